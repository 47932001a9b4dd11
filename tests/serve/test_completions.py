"""Chat and completions through the real ``openai`` client."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.decoding import sample_keys
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams
from tests.serve.bodies import streamed

QUESTION = [{"role": "user", "content": "12+34="}]


@pytest.fixture(scope="module")
def policy(export: Path) -> PreTrainedModel:
    return find_model(export).load_policy("cpu")


@pytest.fixture(scope="module")
def engine_draws(export: Path, policy: PreTrainedModel) -> Callable[..., Rollout]:
    """What an engine draws in this process under the server's keys."""
    model = find_model(export)

    def draw(question: str, *, seed: int, n: int, plain: bool = False, **sampling: float) -> Rollout:
        ids = model.template.encode(question, model.tokenizer)
        return (PlainEngine() if plain else NativeEngine()).generate(
            policy,
            GenerateRequest(
                prompt_ids=[ids],
                keys=[sample_keys(ids, seed=seed, n=n)],
                sampling=SamplingParams(**{"max_completion_length": 40, **sampling}),
                eos_token_ids=[model.tokenizer.eos_token_id],
                pad_token_id=model.tokenizer.pad_token_id,
            ),
        )

    return draw


@pytest.fixture(scope="module")
def texts(export: Path) -> Callable[[Rollout], list[str]]:
    model = find_model(export)

    def read(rollout: Rollout) -> list[str]:
        rows = zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
        return [model.template.completion_text(row[:length], model.tokenizer) for row, length in rows]

    return read


@pytest.mark.parametrize("plain", [False, True])
def test_a_seeded_chat_is_what_the_engine_draws(
    client: openai.OpenAI, engine_draws: Callable, texts: Callable, plain: bool
) -> None:
    rollout = engine_draws("12+34=", seed=7, n=6, plain=plain)
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, n=6, seed=7)
    assert [c.message.content for c in answer.choices] == texts(rollout)
    assert [c.finish_reason for c in answer.choices] == list(rollout.finish_reasons)
    assert set(rollout.finish_reasons) == {"stop", "length"}  # the request must show both
    assert answer.usage.completion_tokens == int(rollout.lengths.sum())
    assert answer.usage.prompt_tokens == int(rollout.prompt_mask[0].sum())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_greedy_truncated_and_hot_sampling_follow_the_engine(
    client: openai.OpenAI, engine_draws: Callable, texts: Callable
) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.7}, {"temperature": 1.4}):
        answer = client.chat.completions.create(model="tiny", messages=QUESTION, n=3, seed=5, max_tokens=20, **sampling)
        rollout = engine_draws("12+34=", seed=5, n=3, **{"max_completion_length": 20, **sampling})
        assert [c.message.content for c in answer.choices] == texts(rollout)


def test_a_stream_of_four_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, n=4, seed=7)
    assert len({len(c.message.content) for c in whole.choices}) > 1  # unequal lengths, so that one could be cut
    finish, roles, usage = [None] * 4, [None] * 4, []
    stream = client.chat.completions.create(
        model="tiny", messages=QUESTION, n=4, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for chunk in chunks:
        if chunk.usage is not None:
            assert chunk.choices == []
            usage.append(chunk.usage)
        for choice in chunk.choices:
            assert finish[choice.index] is None, "text after the end"
            roles[choice.index] = choice.delta.role or roles[choice.index]
            finish[choice.index] = choice.finish_reason
    assert streamed(chunks, 4) == [c.message.content for c in whole.choices]
    assert finish == [c.finish_reason for c in whole.choices]
    assert roles == ["assistant"] * 4
    assert usage == [whole.usage]


def test_a_stream_ends_once(server: Any) -> None:
    for path, prompt in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": ["12", "3"]})):
        body = {**prompt, "stream": True, "max_tokens": 4, "n": 2, "stream_options": {"include_usage": True}}
        text = server.call("POST", f"/v1/{path}", body)[1]
        assert text.count('"choices":[]') == text.count("[DONE]") == 1
        assert text.endswith("data: [DONE]\n\n")


def test_a_stream_comes_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=QUESTION, seed=1, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 3


def test_seeds_decide(client: openai.OpenAI) -> None:
    def ask(**options: int) -> str:
        return client.chat.completions.create(model="tiny", messages=QUESTION, **options).choices[0].message.content

    assert ask(seed=3) == ask(seed=3)
    assert len({ask(seed=s) for s in range(4)} | {ask()}) > 2


def test_logprobs_are_those_of_sampling(client: openai.OpenAI, engine_draws: Callable) -> None:
    rollout = engine_draws("12+34=", seed=7, n=2, temperature=0.8)
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, n=2, seed=7, temperature=0.8, logprobs=True, top_logprobs=3
    )
    for row, choice in enumerate(answer.choices):
        mine = torch.tensor([entry.logprob for entry in choice.logprobs.content])
        torch.testing.assert_close(
            mine, rollout.sampling_logprobs[row][rollout.completion_mask[row]], rtol=1e-4, atol=1e-4
        )
        for entry in choice.logprobs.content:
            best = [top.logprob for top in entry.top_logprobs]
            assert len(best) == 3
            assert best == sorted(best, reverse=True)
            assert entry.logprob <= best[0] + 1e-6
            assert bytes(entry.bytes).decode() == entry.token


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": QUESTION, "seed": 9, "logprobs": True}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    stream = client.chat.completions.create(**options, stream=True)
    chunks = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in chunks if part is not None for entry in part.content] == whole


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    def write(seed: int, **options: Any) -> Any:
        return client.chat.completions.create(model="tiny", messages=QUESTION, seed=seed, **options)

    wholes = {seed: write(seed, logprobs=True).choices[0] for seed in range(8)}
    seed, whole = max(wholes.items(), key=lambda pair: len(pair[1].message.content))
    written = whole.message.content.removeprefix("<think>")
    stop = written[9:12]
    cut = written.index(stop)
    tokens = [entry.token for entry in whole.logprobs.content]
    needed = next(k for k in range(len(tokens)) if stop in "".join(tokens[:k]))
    assert needed < len(tokens) - 10
    answer = write(seed, stop=[stop, "\0never"])
    assert answer.choices[0].message.content == "<think>" + written[:cut]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == needed
    chunks = list(write(seed, stop=stop, stream=True))
    assert streamed(chunks) == ["<think>" + written[:cut]]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_plain_prompts_as_text_and_as_tokens(client: openai.OpenAI, export: Path) -> None:
    tokenizer = find_model(export).tokenizer
    ids = [tokenizer(text).input_ids for text in ("ab", "12+")]
    as_text = client.completions.create(model="tiny", prompt=["ab", "12+"], n=2, seed=4, max_tokens=8, logprobs=1)
    as_ids = client.completions.create(model="tiny", prompt=ids, n=2, seed=4, max_tokens=8)
    assert [c.index for c in as_text.choices] == [0, 1, 2, 3]
    assert [c.text for c in as_text.choices] == [c.text for c in as_ids.choices]
    assert len({c.text for c in as_text.choices}) > 2
    assert as_text.usage.prompt_tokens == 5
    first = as_text.choices[0].logprobs
    assert len(first.tokens) == len(first.token_logprobs) == len(first.text_offset) <= 8
    assert all(len(top) == 1 for top in first.top_logprobs)
    for _ in range(5):  # prompts may end in one moment, and each of their choices ends once
        asked = client.completions.create(model="tiny", prompt=["ab", "12+"], n=2, seed=4, max_tokens=8, stream=True)
        chunks = list(asked)
        assert streamed(chunks, 4) == [c.text for c in as_text.choices]
        ends = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert sorted(ends) == [(c.index, c.finish_reason) for c in as_text.choices]


def test_more_samples_than_slots_are_drawn_in_turns(engine_draws: Callable, texts: Callable, crowded: Any) -> None:
    answer = crowded.openai().chat.completions.create(model="tiny", messages=QUESTION, n=7, seed=7, max_tokens=12)
    assert [c.message.content for c in answer.choices] == texts(
        engine_draws("12+34=", seed=7, n=7, max_completion_length=12)
    )


def test_sixty_four_at_once_get_their_own_answers(server: Any, client: openai.OpenAI) -> None:
    """Chat, streams, completions, scores and evaluations together: each equals the answer it gets alone."""

    def chat(i: int) -> object:
        question = [{"role": "user", "content": f"{i}+{i}="}]
        answer = client.chat.completions.create(model="tiny", messages=question, n=2, seed=i, max_tokens=24)
        return [c.message.content for c in answer.choices]

    def stream(i: int) -> object:
        question = [{"role": "user", "content": f"{i}+{i}="}]
        options = {"n": 2, "seed": i, "max_tokens": 24, "stream": True}
        return streamed(client.chat.completions.create(model="tiny", messages=question, **options), 2)

    def evaluate(i: int) -> object:
        body = {"items": [{"problem": f"{i}+{i}=", "answer": str(2 * i)}], "n": 2, "seed": i, "max_tokens": 24}
        answer = server.ask("/v1/evaluate", body)
        return [sample["completion"] for sample in answer["items"][0]["samples"]]

    def score(i: int) -> object:
        items = [{"completion": rf"\boxed{{{2 * i}}}", "answer": str(2 * (i - i % 2))}]
        answer = server.ask("/v1/score", {"items": items})
        return answer["items"][0]["correct"]

    kinds = [chat, stream, evaluate, score]
    with ThreadPoolExecutor(64) as threads:
        together = list(threads.map(lambda i: kinds[i % 4](i // 4 * 3), range(64)))
    for i in range(64):
        number = i // 4 * 3
        if i % 4 == 3:
            assert together[i] == (number % 2 == 0)
        else:
            assert together[i] == together[i // 4 * 4]  # chat, stream and evaluation of one prompt and seed agree
    alone = [json.dumps(chat(number)) for number in (0, 21, 45)]
    assert alone == [json.dumps(together[number // 3 * 4]) for number in (0, 21, 45)]
    assert len({json.dumps(t) for t in together[::4]}) == 16


def test_the_server_teaches_as_its_model_would_here(server: Any, export: Path, policy: PreTrainedModel) -> None:
    """Log-probabilities of single tokens, of rows of different lengths over several requests."""
    from grpo_pl.extras.teachers.server import served_logprobs
    from grpo_pl.policy.logprobs import completion_logprobs
    from grpo_pl.policy.teacher import TeacherConfig

    rows = [[5, 40, 41, 42], [7, 8], [9] * 30, [60, 61, 62]]
    config = TeacherConfig(path=str(export), url=str(server.openai().base_url), served_name="tiny", rows_per_request=2)
    for row, found in zip(rows, served_logprobs(config, rows), strict=True):
        ids = torch.tensor([row])
        mask = torch.ones_like(ids, dtype=torch.bool)
        expected, _ = completion_logprobs(
            policy, prompt_ids=ids[:, :1], prompt_mask=mask[:, :1], completion_ids=ids[:, 1:],
            completion_mask=mask[:, 1:], temperature=1.0,
        )  # fmt: skip
        torch.testing.assert_close(torch.tensor(found), expected[0].detach(), atol=1e-4, rtol=0)
