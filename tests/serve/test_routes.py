"""The smaller routes: responses, models, tokens, and the description of them all."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from grpo_pl.policy.trained import find_model

ASK: dict[str, Any] = {"model": "tiny", "input": "12+34=", "max_output_tokens": 30, "extra_body": {"seed": 5}}


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASK)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "12+34="}], seed=5, max_tokens=30
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.store is False


def test_a_streamed_response_has_openais_events_in_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage


def test_conversations_instructions_and_formats_reach_the_chat(client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1="}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "<think>2", "annotations": []}],
        },
        {"role": "user", "content": "2+2="},
    ]
    answer = client.responses.create(
        model="tiny",
        input=turns,
        instructions="Add.",
        store=True,
        metadata={"a": "b"},
        include=["reasoning.encrypted_content"],
        extra_body={"seed": 5},
    )
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "<think>2"},
        {"role": "user", "content": "2+2="},
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, seed=5)  # type: ignore[arg-type]
    assert answer.output_text == chat.choices[0].message.content
    assert answer.metadata == {"a": "b"}
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert json.loads(client.responses.create(model="tiny", input="1+1=", text=form).output_text)["x"] in (True, False)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": [{"role": "assistant", "content": "2"}]}, "input"),
        ({"input": "\N{GREEK SMALL LETTER PI}"}, "input"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": 1e-5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"stream_options": {"include_usge": True}}, "include_usge"),
    ],
    ids=str,
)
def test_responses_refuse_what_they_do_not_do(server: Any, change: dict[str, Any], param: str) -> None:
    assert param in server.refusal("/v1/responses", {"input": "1+1=", **change})["message"]


def test_one_model_is_described(server: Any, client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve("tiny") == listed
    assert server.call("GET", "/v1/models/tiny")[1]["max_model_len"] == 4096
    status, answer, _ = server.call("GET", "/v1/models/org/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_texts_become_tokens_and_come_back(server: Any, export: Path) -> None:
    model = find_model(export)
    answer = server.ask("/tokenize", {"model": "tiny", "prompt": "12+\n<think>", "return_token_strs": True})
    ids = model.tokenizer("12+\n<think>").input_ids
    assert answer == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": model.tokenizer.convert_ids_to_tokens(ids),
    }
    assert server.post("/detokenize", {"model": "tiny", "tokens": ids}) == (200, {"prompt": "12+\n<think>"})
    chat = [{"role": "user", "content": "12+34="}]
    tokens = server.post("/tokenize", {"messages": chat, "add_generation_prompt": True})[1]["tokens"]
    assert tokens == model.template.encode("12+34=", model.tokenizer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "\N{GREEK SMALL LETTER PI}"}),
        ("/tokenize", {"prompt": "x" * 200_000}),
        ("/tokenize", {"promt": "x"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [0] * 200_000}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_token_routes_refuse_nonsense(server: Any, path: str, body: dict[str, Any]) -> None:
    server.refusal(path, body)


def test_every_route_is_described_from_its_schema(server: Any) -> None:
    status, document, _ = server.call("GET", "/openapi.json")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            called = server.call(method.upper(), path.replace("{id}", "tiny"), {} if method == "post" else None)[0]
            assert called == 403 if (method, path) == ("post", "/v1/weights") else called in (200, 400)
            if method == "post":
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert schemas[name]["properties"]
    chat = schemas["ChatRequest"]["properties"]
    assert chat["n"]["maximum"] == 64
    assert "min_tokens" in chat
    assert chat["tools"]["items"]["$ref"].endswith("/FunctionTool") and chat["tools"]["maxItems"] == 128
    assert {"required", "$ref"} <= set(re.findall(r"[$\w]+", json.dumps(chat["tool_choice"])))
    assert "likely" in chat["top_logprobs"]["description"]
    references = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
    assert {r.partition('"')[0] for r in references} <= set(schemas)
    status, page, headers = server.call("GET", "/docs")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "repetition_penalty" in page
    assert "<script" not in page
