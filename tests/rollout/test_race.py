"""Whatever computes a draw, the token is the one that a reference of the race names, from the sample's name alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.partial_completions import PartialSampler, extended, new_groups
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.processors import LogitOptions
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.types import Problem, SampleKey, SamplingParams
from tests.race import draw_key, logits_along, winner
from tests.rollout.drawn import PROMPTS, drawn, generate, make_keys, rows_of

pytestmark = pytest.mark.usefixtures("forked")
Allowed = Callable[[list[float]], Iterable[int]]


def assert_raced(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    key: SampleKey,
    *,
    temperature: float,
    allowed: Allowed | None = None,
) -> None:
    for position, row in enumerate((logits_along(model, prompt, tokens) / temperature).tolist()):
        kept = None if allowed is None else list(allowed(row))
        assert winner(row, draw_key(key, position), kept) == tokens[position], f"{key} at {position}"


def _likeliest(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: -logits[token])


def _nucleus(logits: list[float], mass: float) -> Iterator[int]:
    probabilities = torch.tensor(logits).softmax(dim=-1).tolist()
    before = 0.0
    for token in _likeliest(logits):
        if before < mass:
            yield token
        before += probabilities[token]


@pytest.fixture(scope="module")
def child() -> Iterator[RolloutEngine]:
    engine = NativeChildEngine()
    yield engine
    engine.close()


@pytest.mark.parametrize("engine", ["plain", "native", "in batches of 3", "child"])
@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({}, None),
        ({"top_k": 5}, lambda row: _likeliest(row)[:5]),
        ({"top_p": 0.7}, lambda row: _nucleus(row, 0.7)),
        ({"top_p": 0.7, "sampling_mask": True}, lambda row: _nucleus(row, 0.7)),
        ({"top_logprobs": 3, "temperature": 1.3}, None),
    ],
    ids=["whole", "top_k", "top_p", "sampling_mask", "top_logprobs"],
)
def test_an_engine_draws_the_winner(
    engine: str, sampling: dict[str, Any], allowed: Allowed | None, tiny_policy: PreTrainedModel, child: RolloutEngine
) -> None:
    if engine == "child" and "sampling_mask" in sampling:
        pytest.skip("the child keeps no support")
    engines = {"plain": PlainEngine(), "native": NativeEngine(), "in batches of 3": NativeEngine(max_batch_rows=3)}
    if engine == "child":
        child.update_weights(tiny_policy)
    rollout = drawn(engines.get(engine, child), tiny_policy, **sampling)
    temperature = sampling.get("temperature", 0.8)
    for row, tokens in enumerate(rows_of(rollout)):
        key = SampleKey(seed=1, split="train", step=0, attempt=0, prompt_id=row // 4, sample=row % 4)
        assert_raced(tiny_policy, PROMPTS[row // 4], tokens, key, temperature=temperature, allowed=allowed)


class _OnlyOdd:
    """What a grammar is to the batch."""

    def allowed(self, vocabulary: int) -> Tensor:
        return torch.arange(vocabulary) % 2 == 1

    def accept(self, token: int) -> None:
        pass


def test_the_servers_batch_draws_the_winner_under_grammars_bias_and_truncation(tiny_policy: PreTrainedModel) -> None:
    ((*keys,),) = make_keys(1, 3, seed=2, split="predict", step=0, prompt_id=9)
    bias = {8: 4.0, 12: -3.0, 33: 2.0}
    kinds: dict[str, tuple[dict[str, Any], LogitOptions | None, bool, Allowed | None]] = {
        "plain": ({}, None, False, None),
        "top_k": ({"top_k": 4}, None, False, lambda row: _likeliest(row)[:4]),
        "bias": ({}, LogitOptions(logit_bias=tuple(bias.items())), False, None),
        "grammar": ({}, None, True, lambda row: range(1, len(row), 2)),
        "grammar and top_k": ({"top_k": 4}, None, True, lambda row: [v for v in _likeliest(row) if v % 2][:4]),
    }
    batch = ContinuousBatch(tiny_policy, eos_token_ids=[], max_rows=3 * len(kinds))
    tokens: dict[int, list[int]] = {}
    places: dict[str, list[int]] = {}
    for kind, (sampling, logits, grammar, _) in kinds.items():
        options = SequenceOptions(
            sampling=SamplingParams(max_completion_length=8, temperature=1.2, **sampling), logits=logits
        )
        masks = [_OnlyOdd() for _ in keys] if grammar else None
        places[kind] = batch.add(PROMPTS[0], row_keys([keys]), options, masks)
        tokens |= {sequence: [] for sequence in places[kind]}
        for one in batch.step():
            tokens[one.sequence] += one.tokens
    while len(batch):
        for one in batch.step():
            tokens[one.sequence] += one.tokens
    for kind, (_, _, _, allowed) in kinds.items():
        for sequence, key in zip(places[kind], keys, strict=True):
            drawn_here = tokens[sequence]
            along = logits_along(tiny_policy, PROMPTS[0], drawn_here)
            if kind == "bias":
                for token, more in bias.items():
                    along[:, token] += more
            for position, row in enumerate((along / 1.2).tolist()):
                kept = None if allowed is None else list(allowed(row))
                assert winner(row, draw_key(key, position), kept) == drawn_here[position], f"{kind}, at {position}"


def test_a_completion_in_parts_and_a_later_turn_race_on_under_the_samples_name(
    tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampler = CompletionSampler(engine=NativeEngine(), template=PromptTemplate(), tokenizer=tokenizer)
    problem = Problem(id=7, question="7+5=", answer="12")
    sampling = SamplingParams(max_completion_length=11)
    partial = PartialSampler(sampler=sampler, sampling=sampling, seed=3, part=4)
    groups = new_groups([problem], step=4, attempt=1, group_size=4)
    while not all(group.whole for group in groups):
        groups = extended(groups, partial.grow(tiny_policy, groups))
    prompt = PromptTemplate().encode(problem.question, tokenizer)
    named = SampleKey(seed=3, split="train", step=4, attempt=1, prompt_id=7, sample=0)
    for sample, completion in enumerate(groups[0].completions):
        tokens = completion.tokens.tolist()
        assert len(tokens) > 4 or completion.finish_reason == "stop"
        assert_raced(tiny_policy, prompt, tokens, replace(named, sample=sample), temperature=1.0)
    later = replace(named, turn=2)
    rollout = generate(NativeEngine(), tiny_policy, [prompt], [[later]], length=11, eos=[])
    assert_raced(tiny_policy, prompt, rollout.completion_ids[0].tolist(), later, temperature=1.0)
