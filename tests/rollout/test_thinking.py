"""Thinking budgets: every engine draws what a loop of whole forward passes draws, which feeds the end at the budget."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.functional.sampling import Noise, draw_tokens, sample_key, token_keys
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.decoding import join_rollouts, row_keys
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.rollout.thinking import ThoughtMask, drawn_budget
from grpo_pl.types import GenerateRequest, Problem, Rollout, SampleKey, SamplingParams, ThoughtEnd
from tests.conftest import TINY_POLICY
from tests.rollout.drawn import make_keys, rows_of

PROMPTS = [Problem(id=i, question=f"{i}+{i * i}=", answer="") for i in range(3)]
SAMPLING = SamplingParams(max_completion_length=24, thinking_budget=(4, 16), stop_token_ids=tuple(range(20, 24)))
TEMPLATE = PromptTemplate(prefill="<think>", thought_end="e.</think>")
GROUP = 4


def _native(decoder: str) -> NativeEngine:
    engine = NativeEngine(max_batch_rows=5)
    engine.decoder = decoder
    return engine


ENGINES = {
    "plain": PlainEngine(),
    "plain-5": PlainEngine(max_batch_rows=5),
    "native-torch": _native("torch"),
    **{f"native-{name}": _native(name) for name in list(built_kernels())[:1]},
}


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Near to uniform over a hundred tokens, of which one ends a thought and four a completion."""
    return load_model(PolicyConfig(from_scratch={**TINY_POLICY, "initializer_range": 0.05}), tokenizer)


@pytest.fixture
def draw(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Samples]:
    def samples(
        engine: RolloutEngine, sampling: SamplingParams = SAMPLING, template: PromptTemplate = TEMPLATE
    ) -> Samples:
        sampler = CompletionSampler(engine=engine, template=template, tokenizer=tokenizer)
        return sampler.sample(policy, PROMPTS, group_size=GROUP, sampling=sampling, seed=3, split="train", step=2)

    return samples


def _keys() -> list[SampleKey]:
    return [key for group in make_keys(len(PROMPTS), GROUP, seed=3, step=2, prompt_id=0) for key in group]


@torch.no_grad()
def _one_by_one(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams, template: PromptTemplate
) -> list[tuple[list[int], list[bool], list[float], int]]:
    """Tokens, whether the policy wrote each, log-probabilities, and tokens of the thought."""
    close = tokenizer(template.thought_end, add_special_tokens=False).input_ids
    ends = {*sampling.stop_token_ids, int(tokenizer.eos_token_id)}
    rows = []
    for key in _keys():
        prompt = template.encode(PROMPTS[key.prompt_id].asked, tokenizer)
        tokens, written, logprobs, due, thought = [], [], [], [], None
        while len(tokens) < sampling.max_completion_length and not (tokens and written[-1] and tokens[-1] in ends):
            if thought is None and "</think>" in tokenizer.decode(tokens):
                thought = len(tokens)
            if thought is None and len(tokens) == drawn_budget(sampling, key):
                due, thought = list(close), len(tokens)
            logits = policy(torch.tensor([prompt + tokens])).logits[:, -1]
            noise = Noise(token_keys(torch.tensor([sample_key(key)]), len(tokens)))
            token, logprob = draw_tokens(logits, noise, temperature=sampling.temperature, top_k=sampling.top_k)
            written.append(not due)
            tokens.append(due.pop(0) if due else int(token))
            logprobs.append(float(logprob) if written[-1] else 0.0)
        rows.append((tokens, written, logprobs, len(tokens) if thought is None else thought))
    return rows


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("budget", [(4, 16), 7])
def test_engines_draw_what_single_forward_passes_draw(
    draw: Any, engine: RolloutEngine, budget: int, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampling = replace(SAMPLING, thinking_budget=budget)
    samples = draw(engine, sampling)
    expected = _one_by_one(policy, tokenizer, sampling, TEMPLATE)
    rollout, kinds = samples.rollout, set()
    for i, (key, (tokens, written, logprobs, thought)) in enumerate(zip(_keys(), expected, strict=True)):
        length = int(rollout.lengths[i])
        assert rollout.completion_ids[i, :length].tolist() == tokens
        assert rollout.action_mask[i, :length].tolist() == written
        assert rollout.sampling_logprobs[i, :length].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert rollout.thoughts is not None
        assert rollout.thoughts[i, 0].tolist() == [thought, drawn_budget(sampling, key)]
        assert samples.completions[i] == "<think>" + tokenizer.decode(tokens, skip_special_tokens=True)
        ended = tokens[-1] in (*SAMPLING.stop_token_ids, tokenizer.eos_token_id)
        assert rollout.finish_reasons[i] == ("stop" if ended else "length")
        kinds.add((all(written), rollout.finish_reasons[i]))
    assert len(kinds) >= 3  # closed by the budget or not, ended by the policy or by the limit
    assert (rollout.turn_index[rollout.completion_mask & ~rollout.action_mask] == -1).all()
    assert (rollout.policy_version == torch.where(rollout.action_mask, 0, -1)).all()


def test_a_served_sequence_draws_the_same(
    draw: Any, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    expected = draw(PlainEngine()).rollout
    end = TEMPLATE.thought(SAMPLING, tokenizer)
    assert end is not None
    ends = [*SAMPLING.stop_token_ids, int(tokenizer.eos_token_id)]
    batch = ContinuousBatch(policy, eos_token_ids=ends, max_rows=12)
    options = SequenceOptions(sampling=replace(SAMPLING, thinking_budget=None))
    drawn: dict[int, list[int]] = {}
    for p, problem in enumerate(PROMPTS):
        keys = _keys()[p * GROUP : (p + 1) * GROUP]
        masks = [ThoughtMask(end, drawn_budget(SAMPLING, key)) for key in keys]
        prompt = TEMPLATE.encode(problem.asked, tokenizer)
        drawn |= {number: [] for number in batch.add(prompt, row_keys([keys]), options, masks)}
    while len(batch):
        for step in batch.step():
            drawn[step.sequence] += step.tokens
    assert list(drawn.values()) == rows_of(expected)


def test_truncation_and_likeliest_tokens_are_recorded_where_the_policy_wrote(draw: Any) -> None:
    sampling = replace(SAMPLING, top_k=5, sampling_mask=True, top_logprobs=3)
    rollout = draw(PlainEngine(), sampling).rollout
    for rows in (rollout, join_rollouts([rollout, rollout], 0)):
        assert rows.support is not None and rows.top_ids is not None and rows.top_logprobs is not None
        assert ((rows.support >= 0).sum(dim=2) == torch.where(rows.action_mask, 5, 0)).all()
        assert ((rows.top_ids >= 0).sum(dim=2) == torch.where(rows.action_mask, 3, 0)).all()
        assert (rows.top_logprobs.isfinite().all(dim=2) == rows.action_mask).all()
        chosen = (rows.support == rows.completion_ids.unsqueeze(2)).any(dim=2)
        assert (chosen == rows.action_mask).all()


def test_a_stop_string_may_begin_in_the_end_that_was_fed(draw: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    template, sampling = PromptTemplate(thought_end="</think>#"), replace(SAMPLING, thinking_budget=3)
    free = draw(PlainEngine(), sampling, template)
    close = tokenizer("</think>#", add_special_tokens=False).input_ids
    row = next(i for i in range(12) if not free.rollout.action_mask[i, 3] and int(free.rollout.lengths[i]) > 7)
    following = free.rollout.completion_ids[row, 3 + len(close)].item()
    stop = "#" + tokenizer.decode([following])
    for engine in (PlainEngine(), _native("torch")):
        stopped = draw(engine, replace(sampling, stop=(stop,)), template).rollout
        assert (int(stopped.lengths[row]), stopped.finish_reasons[row]) == (4 + len(close), "stop")


def test_a_prefilled_end_leaves_no_thought(draw: Any) -> None:
    template, sampling = PromptTemplate(prefill="<think></think>"), replace(SAMPLING, thinking_budget=3)
    rollout = draw(PlainEngine(), sampling, template).rollout
    free = draw(PlainEngine(), replace(sampling, thinking_budget=None), template).rollout
    assert torch.equal(rollout.completion_ids, free.completion_ids) and rollout.action_mask.sum() == free.lengths.sum()
    assert rollout.thoughts is not None and rollout.thoughts[:, 0].tolist() == [[0, 3]] * 12


def test_budgets_fill_their_range_and_follow_from_the_key() -> None:
    sampling = replace(SAMPLING, thinking_budget=[5, 8])
    key = _keys()[0]
    budgets = [drawn_budget(sampling, replace(key, sample=g)) for g in range(4000)]
    assert budgets == [drawn_budget(sampling, replace(key, sample=g)) for g in range(4000)]
    counts = torch.bincount(torch.tensor(budgets)).tolist()
    assert counts[:5] == [0] * 5 and len(counts) == 9
    assert all(abs(count - 1000) < 4 * 1000**0.5 for count in counts[5:])
    assert {drawn_budget(replace(sampling, thinking_budget=6), each) for each in _keys()} == {6}


def test_the_end_of_a_thought_is_found_token_by_token(tokenizer: PreTrainedTokenizerBase) -> None:
    end = ThoughtEnd(marker="</think>", tokens=(1,), tokenizer=tokenizer)
    for text, expected in (("abc</think>de", 4), ("</think>", 1), ("abc", None), ("", None)):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert end.length(tokens) == expected
    spelt = replace(end, marker="cd")
    assert spelt.length(tokenizer("abcdcd", add_special_tokens=False).input_ids) == 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"thinking_budget": 0}, "thinking_budget must be at least 1, or two such numbers in order, got 0"),
        ({"thinking_budget": (9, 5)}, r"in order, got \(9, 5\)"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_a_budget_must_leave_room_for_an_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    for budget in (23, (4, 23)):
        with pytest.raises(ValueError, match=r"thinking_budget 23 and the 1 tokens .* no room .*length 24"):
            PromptTemplate().thought(replace(SAMPLING, thinking_budget=budget), tokenizer)
    assert PromptTemplate().thought(replace(SAMPLING, thinking_budget=22), tokenizer) is not None


def test_an_engine_that_ignores_limits_is_refused(draw: Any) -> None:
    class Careless(PlainEngine):
        def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Any) -> Rollout:
            longest = replace(request.sampling, max_completion_length=20)
            return super().generate(model, replace(request, limits=None, sampling=longest), **watching)

    class Short(PlainEngine):
        def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Any) -> Rollout:
            shorter = replace(request.sampling, max_completion_length=3)
            return super().generate(model, replace(request, sampling=shorter), **watching)

    short = draw(Short()).rollout  # as one that grows its completions during a run
    assert short.lengths.max() == 3 and short.action_mask.sum() == short.completion_mask.sum()
    with pytest.raises(ValueError, match=r"Careless drew more tokens than request\.limits allows"):
        draw(Careless())
