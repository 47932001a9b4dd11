"""What engines record beside tokens, the support of a truncation and the likeliest tokens: it goes with the rows, and a
run scores and bounds its policy by it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.functional.logprobs import TaughtTokens
from grpo_pl.functional.sampling import likeliest_tokens, truncate_logits
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.top_k_trust_region import TopKTrustRegion
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.logprobs import (
    ForwardMode,
    completion_logprobs,
    completion_states,
    forward_mode,
    update_scores,
    use_forward_mode,
)
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.decoding import join_rollouts
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import NO_TOKEN, Rollout, SamplingParams
from tests.rollout.drawn import drawn

pytestmark = pytest.mark.usefixtures("forked")

ENGINES = [PlainEngine(), PlainEngine(max_batch_rows=3), NativeEngine(), NativeEngine(max_batch_rows=3)]
K = 4


def _draw(engine: RolloutEngine, model: PreTrainedModel, **changes: Any) -> Rollout:
    return drawn(engine, model, **{"top_logprobs": K, **changes})


def _truncated(engine: RolloutEngine, model: PreTrainedModel, **changes: Any) -> Rollout:
    return drawn(engine, model, **{"top_p": 0.7, "sampling_mask": True, **changes})


@contextmanager
def scored_by(model: PreTrainedModel, mode: ForwardMode) -> Iterator[None]:
    found = forward_mode(model)
    use_forward_mode(model, mode)
    try:
        yield
    finally:
        use_forward_mode(model, found)


def _whole(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """(B, T, V) log-probabilities of every token at every place, one column after the other."""
    rows = rollout_rows(rollout, torch.arange(len(rollout.completion_ids)))
    width = rows["completion_ids"].shape[1]
    everything = torch.arange(model.config.vocab_size).expand(len(rollout.completion_ids), width, -1)
    found = update_scores(model.eval(), **rows, top_ids=everything, temperature=0.8).top_logprobs
    assert found is not None
    return found.detach()


# --- the support ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{type(e).__name__} {e.max_batch_rows}")
@pytest.mark.parametrize("truncation", [{}, {"top_p": 1.0, "top_k": 5}, {"top_k": 9, "top_p": 0.6}])
def test_the_policy_scored_over_the_support_gives_what_was_drawn_with(
    engine: RolloutEngine, truncation: dict[str, Any], tiny_policy: PreTrainedModel
) -> None:
    rollout = _truncated(engine, tiny_policy, **truncation)
    mask, support = rollout.action_mask, rollout.support
    assert support is not None and support.shape[:2] == mask.shape
    assert (support == rollout.completion_ids.unsqueeze(2)).any(dim=2)[mask].all()  # what was drawn is in it
    if truncation.get("top_k"):
        assert support.shape[2] <= truncation["top_k"]
    rows = rollout_rows(rollout, torch.arange(len(mask)))
    with torch.no_grad():
        logprobs, _ = completion_logprobs(tiny_policy.eval(), **rows, temperature=0.8, with_entropy=True)
        del rows["support"]
        whole, _ = completion_logprobs(tiny_policy, **rows, temperature=0.8)
    drawn = rollout.sampling_logprobs[:, : logprobs.shape[1]]
    torch.testing.assert_close(logprobs, drawn, rtol=0, atol=2e-5)
    assert (drawn - whole)[mask[:, : logprobs.shape[1]]].min() >= -1e-5 and (drawn - whole).max() > 0.1


@pytest.mark.parametrize("mode", ["packed", "chunked", "materialised"])
def test_a_support_restricts_the_scores_and_not_the_divergence_from_a_teacher(
    mode: ForwardMode, tiny_policy: PreTrainedModel
) -> None:
    rollout = _truncated(NativeEngine(), tiny_policy.eval())
    rows = rollout_rows(rollout, torch.arange(len(rollout.action_mask)))
    rest = {name: tensor for name, tensor in rows.items() if name != "support"}
    states, head = completion_states(tiny_policy, **rest)
    teacher = TaughtTokens(states.flip(0), head.weight, head.bias, 0.5)
    with scored_by(tiny_policy, mode), torch.no_grad():
        logprobs, entropy = completion_logprobs(tiny_policy, **rows, temperature=0.8, with_entropy=True)
        taught = update_scores(tiny_policy, teacher=teacher, **rows, temperature=0.8)
        whole = update_scores(tiny_policy, teacher=teacher, **rest, temperature=0.8)
    drawn = rollout.sampling_logprobs[:, : logprobs.shape[1]]
    torch.testing.assert_close(logprobs, drawn, rtol=0, atol=2e-5)
    torch.testing.assert_close(taught.logprobs, logprobs)
    torch.testing.assert_close(taught.entropy, entropy)
    assert (whole.entropy - taught.entropy).max() > 0.1
    torch.testing.assert_close(taught.divergence, whole.divergence)
    assert taught.divergence is not None and taught.divergence.max() > 0.01


def test_nothing_is_recorded_where_nobody_asked_or_nothing_is_drawn(tiny_policy: PreTrainedModel) -> None:
    assert _truncated(NativeEngine(), tiny_policy, sampling_mask=False).support is None
    greedy = _truncated(NativeEngine(), tiny_policy, temperature=0.0, top_logprobs=K)
    assert greedy.support is None and greedy.top_ids is None and greedy.top_logprobs is None


# --- the likeliest tokens ---------------------------------------------------------------------------------------------


def test_the_likeliest_tokens_of_a_row_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.5, 0.0, 0.25, 0.25]]).log()
    ids, logprobs = likeliest_tokens(truncate_logits(logits, top_k=3), 3)
    assert ids[0].tolist() == [1, 3, 2] and ids[1, 0] == 0 and set(ids[1, 1:].tolist()) == {2, 3}
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[4 / 9, 3 / 9, 2 / 9], [0.5, 0.25, 0.25]]))
    ids, logprobs = likeliest_tokens(logits, 9)  # of four; one of the second row has no mass
    assert ids.shape == (2, 4) and ids.dtype == torch.int32
    assert (ids[1, 3], logprobs[1, 3]) == (NO_TOKEN, -torch.inf)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{type(e).__name__} {e.max_batch_rows}")
def test_recorded_are_the_likeliest_tokens_of_the_policy_that_draws(
    engine: RolloutEngine, tiny_policy: PreTrainedModel
) -> None:
    rollout = _draw(engine, tiny_policy)
    ids, logprobs, mask = rollout.top_ids, rollout.top_logprobs, rollout.action_mask
    assert ids is not None and logprobs is not None and ids.shape == logprobs.shape == (*mask.shape, K)
    best = _whole(tiny_policy, rollout).topk(K, dim=-1)
    width = best.indices.shape[1]
    torch.testing.assert_close(logprobs[:, :width][mask[:, :width]], best.values[mask[:, :width]], rtol=0, atol=2e-5)
    assert torch.equal(ids[:, :width][mask[:, :width]].long(), best.indices[mask[:, :width]])
    assert (ids[~mask] == NO_TOKEN).all() and (logprobs[~mask] == -torch.inf).all()
    among = ids == rollout.completion_ids.unsqueeze(2)
    torch.testing.assert_close(logprobs[among], rollout.sampling_logprobs[among.any(dim=2)], rtol=0, atol=1e-5)
    assert 0 < (mask & ~among.any(dim=2)).sum() < mask.sum()  # some drawn tokens are not among them


def test_recording_changes_no_sample(tiny_policy: PreTrainedModel) -> None:
    for engine in (PlainEngine(), NativeEngine()):
        plain, recorded = (_draw(engine, tiny_policy, top_logprobs=k) for k in (0, K))
        assert plain.top_ids is None and torch.equal(plain.completion_ids, recorded.completion_ids)
        assert torch.equal(plain.sampling_logprobs, recorded.sampling_logprobs)


def test_beside_a_truncation_they_are_those_that_it_left(tiny_policy: PreTrainedModel) -> None:
    rollout = _draw(NativeEngine(), tiny_policy, top_k=3, sampling_mask=True)
    assert rollout.top_ids is not None and rollout.top_logprobs is not None and rollout.support is not None
    ids, mask = rollout.top_ids[rollout.action_mask], rollout.top_logprobs[rollout.action_mask].exp().sum(dim=-1)
    assert (ids[:, 3] == NO_TOKEN).all()
    assert torch.equal(ids[:, :3].sort(dim=1).values, rollout.support[rollout.action_mask])
    torch.testing.assert_close(mask, torch.ones_like(mask))  # all there is to draw


def test_the_child_engine_records_the_same(tiny_policy: PreTrainedModel) -> None:
    engine = NativeChildEngine()
    try:
        theirs, ours = _draw(engine, tiny_policy), _draw(NativeEngine(), tiny_policy)
    finally:
        engine.close()
    assert torch.equal(theirs.top_ids, ours.top_ids)  # type: ignore[arg-type]
    assert torch.equal(theirs.top_logprobs, ours.top_logprobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wide", "narrow", "name", "fill"),
    [
        ({"top_p": 0.7}, {"top_p": 0.3}, "support", NO_TOKEN),
        ({"top_logprobs": K}, {"top_logprobs": K}, "top_ids", NO_TOKEN),
        ({"top_logprobs": K}, {"top_logprobs": K}, "top_logprobs", -torch.inf),
    ],
)
def test_what_two_rollouts_recorded_is_joined(
    tiny_policy: PreTrainedModel, wide: dict[str, Any], narrow: dict[str, Any], name: str, fill: float
) -> None:
    mask = {"sampling_mask": name == "support"}
    long = drawn(NativeEngine(), tiny_policy, **wide, **mask)
    short = drawn(NativeEngine(), tiny_policy, **narrow, **mask, length=3)
    of_long, of_short, both = (getattr(each, name) for each in (long, short, join_rollouts([long, short], 0)))
    rows, places, most = of_short.shape
    assert torch.equal(both[:rows][long.action_mask], of_long[long.action_mask])
    assert torch.equal(both[rows:, :places, :most], of_short)
    assert (both[rows:, places:] == fill).all() and (both[rows:, :, most:] == fill).all()


@pytest.mark.parametrize("mode", ["packed", "chunked", "materialised"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.7, "sampling_mask": True}])
def test_the_policy_scored_at_them_gives_what_was_recorded(
    mode: ForwardMode, truncation: dict[str, Any], tiny_policy: PreTrainedModel
) -> None:
    rollout = _draw(NativeEngine(), tiny_policy.eval(), **truncation)
    assert rollout.top_ids is not None and rollout.top_logprobs is not None
    rows = rollout_rows(rollout, torch.arange(len(rollout.action_mask)))
    width = rows["action_mask"].shape[1]
    with scored_by(tiny_policy, mode):
        scores = update_scores(tiny_policy, **rows, top_ids=rollout.top_ids[:, :width], temperature=0.8)
        alone, entropy = completion_logprobs(tiny_policy, **rows, temperature=0.8, with_entropy=True)
    assert scores.top_logprobs is not None and scores.divergence is None
    assert scores.logprobs.requires_grad and not scores.top_logprobs.isnan().any()
    assert torch.equal(scores.logprobs, alone) and torch.equal(scores.entropy, entropy)  # type: ignore[arg-type]
    mask = rows["action_mask"]
    recorded = rollout.top_logprobs[:, :width][mask]
    torch.testing.assert_close(scores.top_logprobs.detach()[mask], recorded, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", ["packed", "chunked", "materialised"])
def test_they_are_scored_beside_a_teacher(mode: ForwardMode, tiny_policy: PreTrainedModel) -> None:
    rollout = _draw(NativeEngine(), tiny_policy.eval())
    rows: dict[str, Any] = rollout_rows(rollout, torch.arange(len(rollout.action_mask)))
    top_ids = rollout.top_ids[:, : rows["action_mask"].shape[1]]  # type: ignore[index]
    states, head = completion_states(tiny_policy, **rows)
    teacher = TaughtTokens(states.flip(0), head.weight, head.bias, 0.5)
    with scored_by(tiny_policy, mode):
        both = update_scores(tiny_policy, **rows, top_ids=top_ids, teacher=teacher, temperature=0.8)
        taught = update_scores(tiny_policy, **rows, teacher=teacher, temperature=0.8)
        top = update_scores(tiny_policy, **rows, top_ids=top_ids, temperature=0.8)
    assert taught.top_logprobs is None and top.divergence is None
    torch.testing.assert_close(both.divergence, taught.divergence)
    torch.testing.assert_close(both.top_logprobs, top.top_logprobs)
    torch.testing.assert_close((both.logprobs, both.entropy), (top.logprobs, top.entropy))


def test_too_much_to_record_is_refused(tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.rollout.decoding._MOST_RECORDED", 100)
    with pytest.raises(ValueError, match=r"lower the top_k of the term"):
        _draw(NativeEngine(), tiny_policy)
    with pytest.raises(ValueError, match="top_logprobs must be 0"):
        replace(SamplingParams(), top_logprobs=-1)


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_trains_on_truncated_samples_and_the_first_ratio_is_one(command_line: Any, read_metrics: Any) -> None:
    sampling = {"max_completion_length": 32, "top_p": 0.9, "top_k": 20, "sampling_mask": True}
    config = command_line.config(
        "truncated", model__sampling=sampling, model__algorithm__mismatch="truncate_token", data__steps=2
    )
    outcome = command_line(
        "fit", "--config", config, "--model.algorithm.num_minibatches=2", "--model.algorithm.beta=0.01"
    )
    assert outcome.status == 0, outcome.err
    rows = [row for row in read_metrics(command_line.runs / "truncated" / "metrics.csv") if "loss" in row]
    assert rows
    assert all(float(row["sampling/sampling_logp_difference/mean"]) < 1e-4 for row in rows)


DPPO: dict[str, Any] = {
    "group_size": 4,
    "beta": 0.0,
    "surrogate": "dppo_tv",
    "epsilon_low": 0.02,
    "epsilon_high": 0.02,
    "num_minibatches": 2,
}


def _over(top_k: int) -> dict[str, Any]:
    """Over so many likely tokens, or the drawn one alone."""
    term = {
        "class_path": "grpo_pl.objective.terms.top_k_trust_region.TopKTrustRegion",
        "init_args": {"top_k": top_k},
    }
    return DPPO | {"terms": {"likely": term} if top_k else {}}


def _steps(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if "loss" in row]


def _clipped(command_line: Any, read_metrics: Any, name: str, top_k: int) -> float:
    """The share in the first step."""
    config = command_line.config(name, model__algorithm=_over(top_k), data__steps=1)
    command_line.done("fit", "--config", config)
    return float(_steps(read_metrics(command_line.runs / name / "metrics.csv"))[0]["clip_ratio/region_mean"])


def test_a_run_masks_more_tokens_the_more_likely_ones_it_looks_at(command_line: Any, read_metrics: Any) -> None:
    """Of one policy: the second half of the first rollout meets the policy after the first half's update."""
    binary, five, all_of_them = (_clipped(command_line, read_metrics, f"top{k}", k) for k in (0, 5, 500))
    assert 0 <= binary < five <= all_of_them < 1


def test_a_resumed_run_bounds_what_it_drew_ahead_as_the_whole_one_does(command_line: Any, read_metrics: Any) -> None:
    config = command_line.config("ahead", model__algorithm=_over(5), data__staleness=1)
    assert command_line("fit", "--config", config).status == 0
    checkpoint = command_line.runs / "ahead" / "checkpoints" / "rollout-000002.ckpt"
    stored = torch.load(checkpoint, weights_only=True)["rollouts"][0]["samples"]["tensors"]
    assert stored["top_ids"].shape[2] == 5
    assert command_line("fit", "--config", config, "--ckpt_path", checkpoint, "--name=rest").status == 0
    ends = [read_metrics(command_line.runs / name / "metrics.csv") for name in ("ahead", "rest")]
    assert _steps(ends[1]) == _steps(ends[0])[2:]
    last = [_weights(command_line.runs / name) for name in ("ahead", "rest")]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())
    changed = command_line.config("binary", model__algorithm=DPPO, data__staleness=1)
    refused = command_line("fit", "--config", changed, "--ckpt_path", checkpoint)
    assert refused.status != 0 and refused.err.splitlines()[-1].endswith(
        "top_logprobs of model.algorithm.terms is 0, and the checkpoint holds prefetched rollouts for which it was "
        "above 0: resume with the former value, or begin a run of another --name."
    )


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(run / "checkpoints" / "rollout-000004.ckpt", weights_only=True)["state_dict"])


LENGTH = {"max_completion_length": 32}
CHILD = {"class_path": "grpo_pl.extras.engines.native_child.NativeChildEngine"}
REFUSED: dict[str, dict[str, Any]] = {
    "Set sampling_mask true": {"sampling": LENGTH | {"top_p": 0.9}},
    "nothing is truncated": {"sampling": LENGTH | {"sampling_mask": True}},
    "NativeChildEngine does not": {"sampling": LENGTH | {"top_p": 0.9, "sampling_mask": True}, "engine": CHILD},
    "does not go with top_logprobs of": {"algorithm": _over(5), "partial_rollouts": {"part_length": 8}},
    "which the objective's terms set": {"algorithm": _over(5), "sampling": LENGTH | {"top_logprobs": 2}},
    "belongs to surrogate dppo_tv and dppo_kl": {"algorithm": _over(5) | {"surrogate": "clip"}},
    "needs a top_k of at least 1, got -1": {"algorithm": _over(-1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_run_without_the_records_that_it_needs_is_refused(command_line: Any, message: str) -> None:
    changes = {f"model__{name}": value for name, value in REFUSED[message].items()}
    outcome = command_line("fit", "--config", command_line.config("refused", **changes))
    assert outcome.status != 0 and message in outcome.err, outcome.err


def test_an_engine_of_one_s_own_that_does_not_record_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainEngine, "supports_top_logprobs", False)
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2"}),
        rewards=[ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(**DPPO, terms={"likely": TopKTrustRegion(top_k=5)}),
        engine=PlainEngine(),
    )
    with pytest.raises(ValueError, match=r"PlainEngine does not: leave model\.engine out"):
        module.choose_source(RolloutDataModule(ArithmeticPrompts()))
