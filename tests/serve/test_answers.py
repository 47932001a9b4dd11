"""Answers: what they say about tokens."""

import json
from typing import Any

from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve.answers import ChatFormat, Choice, Chunk, TokenTexts
from serve.schemas import ChatRequest


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
    event = _format(letters).chunk(choice, '"b"', new)
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
    answer = _format(letters)
    answer.choices.append(choice)
    (told,) = answer.whole()["choices"]
    assert len(told["logprobs"]["content"]) == 3
    assert told["message"]["content"] == "abc"
