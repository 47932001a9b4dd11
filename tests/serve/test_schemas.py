"""Fields of requests: what real clients send passes, and a fault is reported as one of what was evidently meant."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from serve.errors import ApiError
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest, ScoreRequest
from tests.serve.bodies import parse

BASES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "1"}]},
    CompletionRequest: {"prompt": "1"},
    EvaluateRequest: {"items": [{"problem": "1", "answer": "1", "any column": None}]},
    ScoreRequest: {"items": [{"completion": "1", "answer": "1"}]},
}


def _refusal(kind: type[BaseModel], change: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps({**BASES[kind], **change}).encode())
    assert caught.value.status == 400
    return caught.value


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("openai", {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}),
    ("openai", {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}),
    ("openai", {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}),
    ("openai", {"tool_choice": "auto", "functions": [], "function_call": "none"}),
    ("openai", {"response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "n": 1}),
    ("openai", {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
    ("openai, everything null", dict.fromkeys(("audio", "frequency_penalty", "logit_bias", "logprobs", "max_tokens"))),
    ("openai, everything null", dict.fromkeys(("max_completion_tokens", "metadata", "modalities", "n", "prediction"))),
    ("openai, everything null", dict.fromkeys(("presence_penalty", "reasoning_effort", "response_format", "seed"))),
    ("openai, everything null", dict.fromkeys(("service_tier", "stop", "store", "stream", "stream_options", "tools"))),
    ("openai, everything null", dict.fromkeys(("temperature", "tool_choice", "top_logprobs", "top_p", "verbosity"))),
    ("langchain", {"n": 1, "stream": False, "temperature": 0.7, "presence_penalty": 0, "frequency_penalty": 0.0}),
    ("litellm", {"user": "u", "metadata": None, "logit_bias": None, "tools": None, "functions": None}),
    ("guidellm", {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("guidellm", {"max_completion_tokens": 8, "max_tokens": 8, "ignore_eos": True, "stop": None}),
    ("vercel ai", {"stream_options": {"include_usage": True}, "parallel_tool_calls": None, "top_k": None}),
    ("inspect-ai", {"seed": 1, "max_tokens": 8, "stop": ["x"], "top_logprobs": None, "parallel_tool_calls": False}),
    ("vllm", {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "stop_token_ids": []}),
    ("vllm", {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}),
    ("vllm", {"skip_special_tokens": True, "spaces_between_special_tokens": True, "priority": 0}),
    ("vllm", {"include_stop_str_in_output": False, "request_id": "r", "prompt_logprobs": None}),
]


@pytest.mark.parametrize(("client", "fields"), HARMLESS, ids=lambda value: str(value)[:60])
def test_what_clients_send_and_asks_for_nothing_passes(client: str, fields: dict[str, Any]) -> None:
    assert parse(ChatRequest, json.dumps(BASES[ChatRequest] | fields).encode()).n == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "echo": False, "suffix": "", "user": "u", "logit_bias": {}, "presence_penalty": None},
        {"suffix": None, "stream": None, "logprobs": None, "stop": None, "n": None, "echo": None, "best_of": None},
        {"add_special_tokens": True, "skip_special_tokens": True, "metadata": {}},
    ],
    ids=str,
)
def test_completions_have_their_own_harmless_fields(fields: dict[str, Any]) -> None:
    parse(CompletionRequest, json.dumps(BASES[CompletionRequest] | fields).encode())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("topp", "top_p"),
        ("repitition_penalty", "repetition_penalty"),
        ("guided_regex", "structured_outputs.regex"),
        ("max_new_tokens", "max_tokens"),
        ("qqq", None),
        ("", None),
        ("x" * 100_000, None),
        ("\N{GREEK SMALL LETTER PI}", None),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, EvaluateRequest])
def test_a_field_that_does_not_exist_is_refused_by_name(kind: type[BaseModel], name: str, near: str | None) -> None:
    error = _refusal(kind, {name: 0.5})
    assert (error.code, error.param) == ("unknown_parameter", name[:64] or None)
    assert len(error.message) < 300
    if near is not None:
        assert near in error.message


@pytest.mark.parametrize(
    ("fields", "param", "near"),
    [
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "n"}]}, "messages.0.nmae", "name"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "json_schema"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regex"),
    ],
)
def test_so_is_one_inside_of_another(fields: dict[str, Any], param: str, near: str) -> None:
    error = _refusal(ChatRequest, fields)
    assert (error.code, error.param) == ("unknown_parameter", param)
    assert near in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "high"),
        ("modalities", ["audio"]),
        ("best_of", 2),
        ("skip_special_tokens", False),
        ("prompt_logprobs", 1),
        ("audio", {"voice": "x"}),
    ],
)
def test_a_value_that_asks_for_what_is_not_served_is_refused(name: str, value: Any) -> None:
    error = _refusal(ChatRequest, {name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)


def test_score_has_no_other_fields_either() -> None:
    item = {"completion": "x", "answer": "y", "column": 1}
    parse(ScoreRequest, json.dumps({"items": [item], "group": True, "user": "u", "metadata": None}).encode())
    error = _refusal(ScoreRequest, {"items": [item], "grouped": True})
    assert error.param == "grouped"
    assert "did you mean group" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        *({"n": n} for n in (0, -1, 65, 1.5, "2", True)),
        *({"max_tokens": n} for n in (0, -1, 2.5, "3")),
        {"max_tokens": 3, "max_completion_tokens": 4},
        *({"temperature": t} for t in (-1, 1e-30, 1e30, "hot")),
        *({"top_p": p} for p in (0, -0.5, 1.5, 1e-46)),
        *({"repetition_penalty": p} for p in (0, -1, 1e-46)),
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        *({"min_p": p} for p in (1.1, -0.1)),
        {"min_tokens": -1},
        *({"logit_bias": bias} for bias in ({"5": 101}, {"05": 1}, {"-1": 1}, {"x": 1}, [1])),
        {"logit_bias": {str(i): 0 for i in range(1025)}},
        {"seed": 2**70},
        *({"stop": stop} for stop in ([""], ["x"] * 17)),
        *({"stop_token_ids": ids} for ids in ([-1], ["x"], list(range(129)))),
        *({"bad_words": words} for words in ([""], ["x"] * 129, "x", ["\ud800"])),
        {"top_k": -2},
        *({"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2}),
        {"tools": [{"type": "function"}]},
        {"stream": "yes"},
        {"return_token_ids": 1},
        *({"response_format": {"type": kind}} for kind in ("json_schema", "xml")),
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        *({"structured_outputs": grammar} for grammar in ({}, {"regex": "a", "choice": ["b"]}, {"choice": []})),
        *({"structured_outputs": {"regex": regex}} for regex in ("a" * 40_000, "\ud800")),
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    error = _refusal(ChatRequest, fields)
    assert any(name in error.message for name in fields)


def test_nothing_is_drawn_only_where_the_prompt_is_echoed() -> None:
    assert parse(CompletionRequest, b'{"prompt": "x", "max_tokens": 0, "echo": true}').length == 0
    assert "max_tokens" in _refusal(CompletionRequest, {"max_tokens": 0}).message
    assert "max_tokens" in _refusal(ChatRequest, {"max_tokens": 0}).message


def _said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def _called(arguments: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}]}


def _result(output: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call_output", "call_id": "a", "output": output}]}


@pytest.mark.parametrize(
    ("kind", "change", "param", "message"),
    [
        (ChatRequest, _said(5), "messages.0.content", "a text or a list of parts"),
        (ChatRequest, _said({"type": "text", "text": "1"}), "messages.0.content", "a text or a list of parts"),
        (ChatRequest, _said(["1"]), "messages.0.content.0", "a JSON object"),
        (ChatRequest, _said([{"text": "1"}]), "messages.0.content.0.type", "required"),
        (ChatRequest, _said([{"type": "text"}]), "messages.0.content.0.text", "required"),
        (ChatRequest, _said([{"type": "text", "text": 1}]), "messages.0.content.0.text", "a valid string"),
        (ChatRequest, _said([{"type": "text", "text": "1"}, {"type": "input_audio"}]),
         "messages.0.content.1.type", "'input_text'"),
        (ChatRequest, _said([{"type": "text", "text": "1"}, {"type": "image_url"}]),
         "messages.0.content.1.image_url", "required"),
        (ChatRequest, _said([{"type": "image_url", "image_url": "data:"}]),
         "messages.0.content.0.image_url", "a JSON object"),
        (ChatRequest, _said([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]),
         "messages.0.content.0.image_url.url", "nothing is fetched"),
        (ChatRequest, _said([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
         "messages.0.content.0.image_url.url", "nothing is fetched"),
        (ChatRequest, _said([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]),
         "messages.0.content.0.image_url.url", "nothing is fetched"),
        (ChatRequest, _said([{"type": "image_url", "image_url": {"url": "data:", "detail": "high"}}]),
         "messages.0.content.0.image_url.detail", "does not support 'high'"),
        (ChatRequest, _said([{"type": "text", "text": "1", "image_url": {"url": "data:"}}]),
         "messages.0.content.0.image_url", "has none"),
        (ChatRequest, _said([{"type": "image_url", "image_url": {"url": "data:"}, "text": "1"}]),
         "messages.0.content.0.text", "has none"),
        (ChatRequest,
         {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
         "messages.0.content", "only the user's"),
        (ChatRequest, {"messages": None}, "messages", "required"),
        (ChatRequest, {"messages": []}, "messages", "at least 1"),
        (ChatRequest, {"messages": "1"}, "messages", "a valid list"),
        (ChatRequest, {"messages": [5]}, "messages.0", "a JSON object"),
        (ChatRequest, {"messages": [{"content": "1"}]}, "messages.0.role", "required"),
        (ChatRequest, {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        (ChatRequest, {"messages": [{"role": "wizard", "content": "1"}]}, "messages.0.role", "'user'"),
        (ChatRequest, {"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id", "needs it"),
        (ChatRequest, {"stop": 5}, "stop", "a text or a list of texts"),
        (ChatRequest, {"stop": {}}, "stop", "a text or a list of texts"),
        (ChatRequest, {"stop": ""}, "stop", "1 to 256 characters"),
        (ChatRequest, {"stop": ["x", 5]}, "stop.1", "a valid string"),
        (ChatRequest, {"stop": ["x", ""]}, "stop.1", "at least 1 character"),
        (ChatRequest, {"tool_choice": 5}, "tool_choice", "none, auto, required, or an object"),
        (ChatRequest, {"tool_choice": ["auto"]}, "tool_choice", "none, auto, required, or an object"),
        (ChatRequest, {"tool_choice": "perhaps"}, "tool_choice", "'none', 'auto' or 'required'"),
        (ChatRequest, {"tool_choice": {}}, "tool_choice.type", "required"),
        (ChatRequest, {"tool_choice": {"type": "tool"}}, "tool_choice.type", "'function'"),
        (ChatRequest, {"tool_choice": {"type": "function", "function": "f"}}, "tool_choice.function", "a JSON object"),
        (ChatRequest, {"tool_choice": {"type": "function", "function": {"name": 5}}},
         "tool_choice.function.name", "a valid string"),
        (ChatRequest, {"response_format": "json"}, "response_format", "a JSON object"),
        (ChatRequest, {"response_format": {}}, "response_format.type", "required"),
        (ChatRequest, {"response_format": {"type": "json"}}, "response_format.type", "'json_object'"),
        (ChatRequest, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        *((ChatRequest, {"response_format": {"type": "json_schema", "json_schema": given}},
           "response_format.json_schema.schema", message)
          for given, message in (({}, "required"), ({"schema": 5}, "a JSON object"))),
        (ChatRequest, {"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object, or its text"),
        (ChatRequest, {"structured_outputs": {"json": "\ud800"}}, "structured_outputs.json", "valid string"),
        (ChatRequest, {"logit_bias": {"5": "x"}}, "logit_bias.5", "a valid number"),
        (ChatRequest, _called("[]"), "messages.1.tool_calls.0.function.arguments", "the text must be a JSON object"),
        (ChatRequest, _called("{"), "messages.1.tool_calls.0.function.arguments", "the text is not valid JSON"),
        (ChatRequest, _called({}), "messages.1.tool_calls.0.function.arguments", "a valid string"),
        (CompletionRequest, {"prompt": None}, "prompt", "required"),
        *((CompletionRequest, {"prompt": prompt}, "prompt", "a list of token ids") for prompt in (5, [1.5], [True])),
        (CompletionRequest, {"prompt": [1, "1"]}, "prompt.1", "a valid integer"),
        (CompletionRequest, {"prompt": ["1", 1]}, "prompt.1", "a valid string"),
        (CompletionRequest, {"prompt": [[1], "1"]}, "prompt.1", "a valid list"),
        (CompletionRequest, {"prompt": [[1], [1, "1"]]}, "prompt.1.1", "a valid integer"),
        *((kind, {"items": None}, "items", "required") for kind in (EvaluateRequest, ScoreRequest)),
        (EvaluateRequest, {"items": [{"problem": "1"}]}, "items.0.answer", "required"),
        (ScoreRequest, {"items": [{"completion": "1"}]}, "items.0.answer", "required"),
        (ScoreRequest, {"items": [{"answer": "1"}]}, "items.0.completion", "required"),
        (EvaluateRequest, {"items": [{"problem": "1", "answer": "1", "id": 1.5}]}, "items.0.id", "or a text"),
        (EvaluateRequest, {"items": [{"problem": "1", "answer": "1", "id": "\ud800"}]}, "items.0.id", "valid string"),
        (EvaluateRequest, {"items": [{"problem": "1", "answer": "1", "id": 2**64}]}, "items.0.id", "less than"),
        (ScoreRequest, {"items": [{"completion": 5, "answer": "1"}]}, "items.0.completion", "a valid string"),
    ],
)  # fmt: skip
def test_the_fault_is_one_of_the_member_that_was_meant(
    kind: type[BaseModel], change: dict[str, Any], param: str, message: str
) -> None:
    error = _refusal(kind, change)
    assert (error.param, error.code == "missing_field") == (param, message == "required")
    assert error.message.startswith(f"{param}: ") and message in error.message


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((ChatRequest, _said(content)) for content in ("1", [{"type": "text", "text": "1"}], [])),
        *((ChatRequest, {"stop": stop}) for stop in ("x", ["x"], [], None)),
        *((ChatRequest, {"tool_choice": choice}) for choice in ("none", "auto", None)),
        *((ChatRequest, {"structured_outputs": {"json": schema}}) for schema in ({}, "{}")),
        *((CompletionRequest, {"prompt": prompt}) for prompt in ("1", ["1", "2"], [1, 2], [[1], [2, 3]], [])),
        *((EvaluateRequest, {"items": [{"problem": "1", "answer": "1", "id": i}]}) for i in (5, "5", None)),
    ],
)  # fmt: skip
def test_each_member_is_read(kind: type[BaseModel], change: dict[str, Any]) -> None:
    assert parse(kind, json.dumps({**BASES[kind], **change}).encode())
