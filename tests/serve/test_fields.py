"""Which fields a request may hold: what real clients send passes, and nothing else is ignored in silence."""

import json
from typing import Any

import pytest

from serve.errors import ApiError
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest, ScoreRequest
from tests.serve.bodies import parse

CHAT = {"messages": [{"role": "user", "content": "1+1="}]}
COMPLETION = {"prompt": "1+1="}
EVALUATE = {"items": [{"problem": "1+1=", "answer": "2", "any column": None}]}

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
    asked = parse(ChatRequest, json.dumps(CHAT | fields).encode())
    assert asked.n == 1


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
    parse(CompletionRequest, json.dumps(COMPLETION | fields).encode())


def _refusal(kind: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


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
@pytest.mark.parametrize(
    ("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION), (EvaluateRequest, EVALUATE)]
)
def test_a_field_that_does_not_exist_is_refused_by_name(
    kind: Any, body: dict[str, Any], name: str, near: str | None
) -> None:
    error = _refusal(kind, body | {name: 0.5})
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
    error = _refusal(ChatRequest, CHAT | fields)
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
    error = _refusal(ChatRequest, CHAT | {name: value})
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
    error = _refusal(ChatRequest, CHAT | fields)
    assert any(name in error.message for name in fields)


def test_nothing_is_drawn_only_where_the_prompt_is_echoed() -> None:
    assert parse(CompletionRequest, b'{"prompt": "x", "max_tokens": 0, "echo": true}').length == 0
    assert "max_tokens" in _refusal(CompletionRequest, COMPLETION | {"max_tokens": 0}).message
    assert "max_tokens" in _refusal(ChatRequest, CHAT | {"max_tokens": 0}).message
