"""A fault in a field of several types is reported as one of what the client evidently meant."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from serve.errors import ApiError
from serve.responses import ResponsesRequest
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest, ScoreRequest
from tests.serve.bodies import parse

BASES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "1"}]},
    CompletionRequest: {"prompt": "1"},
    EvaluateRequest: {"items": [{"problem": "1", "answer": "1"}]},
    ResponsesRequest: {"input": "1"},
    ScoreRequest: {"items": [{"completion": "1", "answer": "1"}]},
}


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
        (ChatRequest, _said([{"type": "text", "text": "1"}, {"type": "image_url"}]),
         "messages.0.content.1.type", "'input_text'"),
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
        (ResponsesRequest, {"input": 5}, "input", "a text, or a list of messages"),
        (ResponsesRequest, {"input": [5]}, "input.0", "a JSON object"),
        (ResponsesRequest, {"input": [{"role": "user", "content": 5}]}, "input.0.content", "a list of parts"),
        (ResponsesRequest, _result(5), "input.0.output", "a list of parts"),
        (ResponsesRequest, _result([{"type": "input_text", "text": 5}]), "input.0.output.0.text", "a valid string"),
        (ResponsesRequest, {"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        (ResponsesRequest, {"text": {"format": "json"}}, "text.format", "a JSON object"),
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
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps({**BASES[kind], **change}).encode())
    assert (caught.value.param, caught.value.code == "missing_field") == (param, message == "required")
    assert caught.value.message.startswith(f"{param}: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((ChatRequest, _said(content)) for content in ("1", [{"type": "text", "text": "1"}], [])),
        *((ChatRequest, {"stop": stop}) for stop in ("x", ["x"], [], None)),
        *((ChatRequest, {"tool_choice": choice}) for choice in ("none", "auto", None)),
        *((ChatRequest, {"structured_outputs": {"json": schema}}) for schema in ({}, "{}")),
        *((CompletionRequest, {"prompt": prompt}) for prompt in ("1", ["1", "2"], [1, 2], [[1], [2, 3]], [])),
        *((ResponsesRequest, {"input": given}) for given in ("1", [{"role": "user", "content": "1"}])),
        *((ResponsesRequest, _result(output)) for output in ("1", [{"type": "input_text", "text": "1"}])),
        *((EvaluateRequest, {"items": [{"problem": "1", "answer": "1", "id": i}]}) for i in (5, "5", None)),
    ],
)  # fmt: skip
def test_each_member_is_read(kind: type[BaseModel], change: dict[str, Any]) -> None:
    assert parse(kind, json.dumps({**BASES[kind], **change}).encode())
