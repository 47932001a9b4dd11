"""What sampling parameters, grammars, echo and conversations do to real answers."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from grpo_pl.policy.trained import find_model
from tests.serve.bodies import CHAT, COMPLETIONS, streamed

ASK = {"messages": [{"role": "user", "content": "12+34="}], "n": 8, "seed": 7, "temperature": 1.0}


@pytest.fixture(scope="module")
def token_of(export: Path) -> dict[str, int]:
    return dict(find_model(export).tokenizer.get_vocab())


def _choices(server: Any, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    answer = server.ask(path, body)
    return list(answer["choices"])


def _texts(server: Any, **fields: Any) -> list[str]:
    return [c["message"]["content"].removeprefix("<think>") for c in _choices(server, ASK | fields)]


def test_penalties_bias_and_bans_shape_the_text(server: Any, token_of: dict[str, int]) -> None:
    plain = _texts(server)
    assert _texts(server, top_k=-1, min_p=0.0, presence_penalty=0, logit_bias={}, repetition_penalty=1) == plain
    assert set("".join(_texts(server, logit_bias={str(token_of["7"]): 100}))) == {"7"}
    common = max("0123456789", key="".join(plain).count)  # tags, which are tokens of their own, have no digits
    assert common not in "".join(_texts(server, bad_words=[common]))
    pairs = {a + b for text in plain for a, b in pairwise(text)}
    pair = next(pair for pair in sorted(pairs) if pair not in "<think></think><answer></answer>")  # those are tokens
    assert pair not in "".join(_texts(server, bad_words=[pair, "\N{GREEK SMALL LETTER PI}"]))
    repeats = [len(text) - len(set(text)) for text in _texts(server, presence_penalty=2, frequency_penalty=2)]
    assert sum(repeats) < sum(len(text) - len(set(text)) for text in plain)
    assert _texts(server, repetition_penalty=5.0) != plain
    greedy = _texts(server, temperature=0, n=1)
    assert _texts(server, min_p=1.0, n=1) == greedy  # only the likeliest token is left


def test_min_tokens_puts_off_every_kind_of_end(server: Any, token_of: dict[str, int]) -> None:
    plain = _texts(server)
    assert min(map(len, plain)) < 12
    assert min(map(len, _texts(server, min_tokens=12))) >= 12
    first = max(plain, key=len)[0]
    assert all(len(text) >= 12 for text in _texts(server, min_tokens=12, stop=[first]))
    assert all(len(text) >= 12 for text in _texts(server, min_tokens=12, stop_token_ids=[token_of[first]]))


def test_a_stop_token_ends_the_text_before_it_and_counts(server: Any, token_of: dict[str, int]) -> None:
    plain = _texts(server)
    letter = next(letter for letter in max(plain, key=len) if letter.isdigit())  # no part of a tag
    asked = ASK | {"stop_token_ids": [token_of[letter]], "return_token_ids": True}
    for whole, choice in zip(plain, _choices(server, asked), strict=True):
        text = choice["message"]["content"].removeprefix("<think>")
        assert text == whole.split(letter)[0]
        if letter in whole:
            assert choice["finish_reason"] == "stop"
            assert choice["token_ids"][-1] == token_of[letter]
    with server.openai().chat.completions.create(
        model="tiny", messages=ASK["messages"], seed=7, stream=True, extra_body={"stop_token_ids": [token_of[letter]]}
    ) as stream:
        assert streamed(stream)[0].removeprefix("<think>") == plain[0].split(letter)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"100000": 1}},
        {"stop_token_ids": [100_000]},
        {"min_tokens": 41},
        {"min_tokens": 9, "max_tokens": 8},
    ],
    ids=lambda value: str(value)[:50],
)
def test_parameters_that_cannot_be_met_are_400(server: Any, fields: dict[str, Any]) -> None:
    error = server.refusal(CHAT, ASK | fields)
    assert error["type"] == "invalid_request_error"


def test_nothing_left_to_draw_is_the_clients_mistake(server: Any, token_of: dict[str, int]) -> None:
    """The grammar is satisfied by one letter, and the end is not allowed yet."""
    error = server.refusal(CHAT, ASK | {"structured_outputs": {"regex": "a"}, "min_tokens": 5})
    assert "nothing is left to draw" in error["message"]


def test_answers_follow_a_grammar_and_have_no_prefill(server: Any, client: openai.OpenAI) -> None:
    def contents(**fields: Any) -> list[str]:
        choices = _choices(server, ASK | {"max_tokens": 400} | fields)
        assert {c["finish_reason"] for c in choices} == {"stop"}
        return [c["message"]["content"] for c in choices]

    regex = r"[a-f]{2,4}-[01]{1,40}"
    assert all(re.fullmatch(regex, text) for text in contents(structured_outputs={"regex": regex}, min_p=0.01))
    assert set(contents(structured_outputs={"choice": ["yes", 'n"o', "maybe"]})) <= {"yes", 'n"o', "maybe"}
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for text in contents(response_format=wrapped) + contents(structured_outputs={"json": schema}):
        value = json.loads(text)
        assert set(value) == {"sum", "sure"}
        assert 0 <= value["sum"] <= 99
    answer = client.chat.completions.create(
        model="tiny", messages=ASK["messages"], seed=3, response_format=wrapped, stream=True
    )
    assert set(json.loads(streamed(answer)[0])) == {"sum", "sure"}
    free = _choices(server, ASK | {"response_format": {"type": "json_object"}, "max_tokens": 60})
    assert all(c["message"]["content"].startswith("{") for c in free)


def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(server: Any, export: Path) -> None:
    model = find_model(export)
    policy, tokenizer = model.load_policy("cpu"), model.tokenizer
    prompts = ["12+34=46", "a", "ab\ncd"]
    ids = [tokenizer(text).input_ids for text in prompts]
    asked = {"echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0, "n": 1}
    as_text, as_ids = (_choices(server, asked | {"prompt": p}, COMPLETIONS) for p in (prompts, ids))
    for one, other, text, tokens in zip(as_text, as_ids, prompts, ids, strict=True):
        assert one["text"].startswith(text)
        told = one["logprobs"]
        for name in ("tokens", "text_offset"):
            assert other["logprobs"][name] == told[name]
        # prompts of one request may be read together or apart, which shows in the last digits
        assert other["logprobs"]["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-5)
        with torch.no_grad():
            expected = policy(torch.tensor([tokens])).logits[0].log_softmax(-1)
        own = [expected[i, t].item() for i, t in enumerate(tokens[1:])]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(tokens)] == pytest.approx(own, abs=1e-4)
        assert "".join(told["tokens"][: len(tokens)]) == text
        assert len(told["tokens"]) == len(tokens) + 1
        assert told["text_offset"][: len(tokens)] == list(range(len(tokens)))
        for i, top in enumerate(told["top_logprobs"][1:-1]):
            assert max(top.values()) == pytest.approx(expected[i].max().item(), abs=1e-4)


def test_an_echo_of_nothing_more_is_the_prompt(server: Any, client: openai.OpenAI) -> None:
    body = {"prompt": ["12+34=", "7"], "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = server.ask(COMPLETIONS, body)
    assert [c["text"] for c in answer["choices"]] == ["12+34=", "7"]
    assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [6, 1]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    plain = client.completions.create(model="tiny", prompt="12+", max_tokens=6, seed=1, n=2, echo=True)
    chunks = client.completions.create(
        model="tiny", prompt="12+", max_tokens=6, seed=1, n=2, echo=True, stream=True, logprobs=1
    )
    parts = streamed(chunks, 2)
    assert parts == [c.text for c in plain.choices]
    assert all(part.startswith("12+") for part in parts)


def test_token_ids_come_back_on_request(server: Any, export: Path) -> None:
    model = find_model(export)
    prompt = model.template.encode("12+34=", model.tokenizer)
    body = ASK | {"n": 2, "return_token_ids": True}
    answer = server.ask(CHAT, body)
    assert answer["prompt_token_ids"] == prompt
    for choice in answer["choices"]:
        assert (
            "<think>" + model.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
            == (choice["message"]["content"])
        )
    events = [
        json.loads(line[6:])
        for line in server.call("POST", CHAT, body | {"stream": True})[1].splitlines()
        if line.startswith("data: {")
    ]
    streamed: list[list[int]] = [[], []]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == [c["token_ids"] for c in answer["choices"]]
    assert events[0]["prompt_token_ids"] == prompt
    answer = server.ask(COMPLETIONS, {"prompt": "ab", "max_tokens": 3, "return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == model.tokenizer("ab").input_ids
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    answer = server.ask(CHAT, ASK)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]


def test_earlier_turns_stand_before_the_question_as_examples_do(server: Any) -> None:
    """Without a chat template: blocks of text, with an empty line between."""
    turns = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "<think>2"},
        {"role": "user", "content": "2+2="},
        {"role": "user", "content": "3+3="},
    ]
    rendered = "Add.\n\n1+1=<think>2\n\n2+2=\n\n3+3=<think>"
    chat = _choices(server, ASK | {"messages": turns, "n": 2})
    plain = _choices(server, {"prompt": rendered, "n": 2, "seed": 7, "temperature": 1.0}, COMPLETIONS)
    assert [c["message"]["content"] for c in chat] == ["<think>" + c["text"] for c in plain]


def test_usage_comes_with_every_chunk_when_asked(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=ASK["messages"], seed=7, stream=True, stream_options=options, max_tokens=20
        )
    )
    drawn = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert drawn == sorted(drawn)
    assert len(drawn) == len(chunks) - 1  # all but the opening


def test_max_thinking_tokens_ends_a_thought(server: Any) -> None:
    plain = _texts(server, max_tokens=24)
    ended = _texts(server, max_tokens=24, max_thinking_tokens=3)
    assert any("</think>" not in text for text in plain)
    tags = re.compile("</?(?:think|answer)>|.", re.DOTALL)  # the tokens of the policy
    for before, after in zip(plain, ended, strict=True):
        tokens, first = tags.findall(after), tags.findall(before)[:3]
        assert tokens[:3] == first
        assert len(tokens) <= 3 or "</think>" in tokens[:4]
    drawn = _choices(server, ASK | {"max_tokens": 24, "max_thinking_tokens": 3, "logprobs": True})
    fed = [c["logprobs"]["content"][3] for c in drawn if "</think>" not in c["message"]["content"][7:10]]
    assert {(token["token"], token["logprob"]) for token in fed if token["token"] == "</think>"} == {("</think>", 0.0)}
    raw = {"prompt": "1+1=", "n": 8, "seed": 7, "max_tokens": 20, "max_thinking_tokens": 2}
    assert all(
        "</think>" in tags.findall(c["text"])[:3] or len(c["text"]) <= 2 for c in _choices(server, raw, COMPLETIONS)
    )


def test_a_thinking_budget_without_room_or_beside_a_grammar_is_refused(server: Any) -> None:
    error = server.refusal(CHAT, ASK | {"max_tokens": 4, "max_thinking_tokens": 3})
    assert error["param"] == "max_thinking_tokens" and "no room" in error["message"]
    error = server.refusal(CHAT, ASK | {"max_thinking_tokens": 3, "structured_outputs": {"choice": ["1"]}})
    assert error["param"] == "max_thinking_tokens"
