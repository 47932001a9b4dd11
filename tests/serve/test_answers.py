"""Answers: what they say about tokens; items of responses, the same however an answer is cut, and accepted again."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from grpo_pl.environments.call_reader import CallReader
from grpo_pl.environments.tool_calls import HermesCalls
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve.answers import ChatFormat, Choice, TokenTexts
from serve.conversations import Conversation
from serve.errors import ApiError
from serve.generator import Chunk
from serve.responses import ResponsesFormat, ResponsesRequest
from serve.schemas import ChatRequest
from tests.serve.bodies import parse


class Letters:
    """A tokenizer of characters, which counts what it is asked."""

    asked = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        self.asked += 1
        return "".join(map(chr, tokens))


def _chunk(*tokens: int) -> Chunk:
    top = ((ord("a"), -0.25), (0xD800, -1e-9))
    return Chunk(0, [ScoredToken(token, -0.5, top) for token in tokens], "length")


def _format(letters: Letters, **more: Any) -> ChatFormat:
    body = {"messages": [{"role": "user", "content": "?"}], "logprobs": True, "top_logprobs": 2, **more}
    return ChatFormat("tiny", ChatRequest.model_validate(body), TokenTexts(letters))  # type: ignore[arg-type]


def test_log_probabilities_are_openais_objects_and_each_text_is_made_once() -> None:
    letters = Letters()
    choice = Choice(0, TextStream(letters), [1], [])  # type: ignore[arg-type]
    _, new = choice.push(_chunk(*b'"b"'))
    letters.asked = 0
    event = _format(letters).chunk(choice, '"b"', new, [choice])
    told = json.loads(event.removeprefix("data: "))["choices"][0]["logprobs"]
    top = [
        {"token": "a", "bytes": [97], "logprob": -0.25},
        {"token": "\ud800", "bytes": [0xED, 0xA0, 0x80], "logprob": -1e-9},
    ]
    quote = {"token": '"', "bytes": [34], "logprob": -0.5, "top_logprobs": top}
    assert told == {"content": [quote, {**quote, "token": "b", "bytes": [98]}, quote], "refusal": None}
    assert letters.asked == 4  # two kinds of tokens and two alternatives


def test_a_stream_keeps_no_tokens_and_a_whole_answer_has_all() -> None:
    letters = Letters()
    for streams, kept in (True, 0), (False, 3):
        choice = Choice(0, TextStream(letters), [1], [])  # type: ignore[arg-type]
        choice.streams = streams
        assert len(choice.push(_chunk(*b"abc"))[1]) == 3
        assert len(choice.tokens) == kept
    (told,) = _format(letters).whole([choice])["choices"]
    assert len(json.loads("".join(told["logprobs"]["content"].pieces))) == 3
    assert told["message"]["content"] == "abc"


TOKENIZER = character_tokenizer()
TOOLS = {name: {"type": "function", "function": {"name": name}} for name in ("look", "turn")}
LOOK, TURN = (f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in TOOLS)
ASKED = {"input": "Where?", "tools": [{"type": "function", "name": name} for name in TOOLS]}


def answer(text: str, size: int | None) -> list[dict[str, Any]]:
    """The output of an answer with this text; with a size, streamed in events of so many tokens."""
    body = parse(ResponsesRequest, json.dumps(ASKED | {"model": "tiny"}).encode())
    answer_format = ResponsesFormat(body, body.chat(), "tiny")
    choice = Choice(0, TextStream(TOKENIZER), [1], (), reader=CallReader(HermesCalls(), TOOLS, several=True))
    drawn = [ScoredToken(token, 0.0, ()) for token in TOKENIZER(text, add_special_tokens=False).input_ids]
    if size is None:
        choice.push(Chunk(0, drawn, "stop"))
        return list(answer_format.whole([choice])["output"])
    sent = answer_format.opening(choice)
    for at in range(0, len(drawn), size):
        new = choice.push(Chunk(0, drawn[at : at + size], "stop" if at + size >= len(drawn) else None))
        sent += answer_format.chunk(choice, *new, [choice])
    sent += answer_format.closing([choice])
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    done = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    output = events[-1]["response"]["output"]
    assert [done[i] for i in range(len(done))] == output
    return list(output)


def told(output: list[dict[str, Any]]) -> list[str]:
    return [item["name"] if item["type"] == "function_call" else item["content"][0]["text"] for item in output]


def sent_back(output: list[dict[str, Any]]) -> list[Any]:
    """The conversation after the output and a result for each of its calls."""
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "a wall"}
        for item in output
        if item["type"] == "function_call"
    ]
    items = [{"role": "user", "content": "Where?"}, *output, *results]
    request = parse(ResponsesRequest, json.dumps(ASKED | {"input": items}).encode())
    return Conversation.of(request.chat().messages).exchanges[0].actions


@pytest.mark.parametrize("size", [None, 1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "items", "beside"),
    [
        (f"{LOOK}\n{TURN}", ["look", "turn"], ""),
        (f"{LOOK}\n\n", ["look"], ""),
        (f"So {LOOK}\n{TURN}\n", ["So ", "look", "turn"], "So "),
        (f"{LOOK}\nthen {TURN}", ["look", "\nthen ", "turn"], "\nthen "),
        (f"{LOOK}{TURN} done", ["look", "turn", " done"], " done"),
    ],
)
def test_items_keep_their_order_and_come_back(text: str, items: list[str], beside: str, size: int | None) -> None:
    output = answer(text, size)
    assert told(output) == items
    (action,) = sent_back(output)
    assert (action.text, [call.name for call in action.calls]) == (beside, [i for i in items if i in TOOLS])


def test_all_fields_of_the_official_client_come_back() -> None:
    """``model_dump`` writes those that the server left out as null."""
    output = answer(f"So {LOOK}{TURN}", None)
    kinds = {"message": ResponseOutputMessage, "function_call": ResponseFunctionToolCall}
    dumped = [kinds[item["type"]].model_validate(item).model_dump() for item in output]
    assert {"async_", "caller", "namespace"} <= dumped[1].keys() and "phase" in dumped[0]
    aliased = [kinds[item["type"]].model_validate(item).model_dump(by_alias=True) for item in output]
    assert sent_back(dumped) == sent_back(aliased) == sent_back(output)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("a wall", "a wall"),
        ([{"type": "input_text", "text": "a "}, {"type": "input_text", "text": "wall"}], "a wall"),
        ([], ""),
    ],
)
def test_a_result_is_a_text_or_pieces_of_one(given: Any, text: str) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": given, "caller": None, "name": None}
    items = [{"role": "user", "content": "Where?"}, call, result]
    request = parse(ResponsesRequest, json.dumps({"input": items}).encode())
    assert request.chat().messages[-1].text == text


def test_a_result_that_is_no_text_is_refused() -> None:
    result = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "x"}]}
    with pytest.raises(ApiError, match=r"^400: input"):
        parse(ResponsesRequest, json.dumps({"input": [result]}).encode())


def test_an_answer_after_results_is_an_action_of_its_own() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "a wall"}
    said = {"type": "message", "role": "assistant", "content": "Here."}
    items = [{"role": "user", "content": "Where?"}, call, result, said, {"role": "user", "content": "Sure?"}]
    request = parse(ResponsesRequest, json.dumps({"input": items}).encode())
    first, last = Conversation.of(request.chat().messages).exchanges
    assert [(action.text, len(action.calls)) for action in first.actions] == [("", 1), ("Here.", 0)]
    assert last.question == "Sure?"
