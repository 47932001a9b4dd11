"""What truncation leaves is recorded by the engines, goes with the rows, and is what the policy is scored over."""

import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.functional.logprobs import TaughtTokens
from grpo_pl.policy.logprobs import (
    ForwardMode,
    completion_logprobs,
    completion_states,
    forward_mode,
    update_scores,
    use_forward_mode,
)
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.groups import join_rollouts
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.types import Rollout
from tests.rollout.drawn import drawn

ENGINES = [PlainEngine(), PlainEngine(max_batch_rows=3), NativeEngine(), NativeEngine(max_batch_rows=3)]


def _draw(engine: RolloutEngine, model: PreTrainedModel, **changes: Any) -> Rollout:
    return drawn(engine, model, **{"top_p": 0.7, "sampling_mask": True, **changes})


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{type(e).__name__} {e.max_batch_rows}")
@pytest.mark.parametrize("truncation", [{}, {"top_p": 1.0, "top_k": 5}, {"top_k": 9, "top_p": 0.6}])
def test_the_policy_scored_over_the_support_gives_what_was_drawn_with(
    engine: RolloutEngine, truncation: dict[str, Any], tiny_policy: PreTrainedModel
) -> None:
    rollout = _draw(engine, tiny_policy, **truncation)
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
    rollout = _draw(NativeEngine(), tiny_policy.eval())
    rows = rollout_rows(rollout, torch.arange(len(rollout.action_mask)))
    rest = {name: tensor for name, tensor in rows.items() if name != "support"}
    states, head = completion_states(tiny_policy, **rest)
    teacher = TaughtTokens(states.flip(0), head.weight, head.bias, 0.5)
    found = forward_mode(tiny_policy)
    use_forward_mode(tiny_policy, mode)
    try:
        with torch.no_grad():
            logprobs, entropy = completion_logprobs(tiny_policy, **rows, temperature=0.8, with_entropy=True)
            taught = update_scores(tiny_policy, teacher=teacher, **rows, temperature=0.8)
            whole = update_scores(tiny_policy, teacher=teacher, **rest, temperature=0.8)
    finally:
        use_forward_mode(tiny_policy, found)
    drawn = rollout.sampling_logprobs[:, : logprobs.shape[1]]
    torch.testing.assert_close(logprobs, drawn, rtol=0, atol=2e-5)
    torch.testing.assert_close(taught.logprobs, logprobs)
    torch.testing.assert_close(taught.entropy, entropy)
    assert (whole.entropy - taught.entropy).max() > 0.1
    torch.testing.assert_close(taught.divergence, whole.divergence)
    assert taught.divergence is not None and taught.divergence.max() > 0.01


def test_engines_and_chunks_of_rows_agree(tiny_policy: PreTrainedModel) -> None:
    first, *others = [_draw(engine, tiny_policy) for engine in ENGINES]
    assert first.support is not None
    for other in others:
        assert other.support is not None and torch.equal(other.completion_ids, first.completion_ids)
        assert torch.equal(other.support[other.action_mask], first.support[first.action_mask])


def test_nothing_is_recorded_where_nobody_asked_or_nothing_is_drawn(tiny_policy: PreTrainedModel) -> None:
    assert _draw(NativeEngine(), tiny_policy, sampling_mask=False).support is None
    assert _draw(NativeEngine(), tiny_policy, temperature=0.0).support is None


def test_supports_of_two_rollouts_are_joined(tiny_policy: PreTrainedModel) -> None:
    wide = _draw(NativeEngine(), tiny_policy)
    narrow = _draw(NativeEngine(), tiny_policy, top_p=0.3, max_completion_length=3)
    both = join_rollouts([wide, narrow], 0).support
    assert both is not None and wide.support is not None and narrow.support is not None
    rows = len(wide.completion_ids)
    assert torch.equal(both[:rows][wide.action_mask], wide.support[wide.action_mask])
    part = both[rows:, : narrow.support.shape[1], : narrow.support.shape[2]]
    assert torch.equal(part, narrow.support)
    assert (both[rows:, narrow.support.shape[1] :] == -1).all()


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_trains_on_truncated_samples_and_the_first_ratio_is_one(command_line: Any, read_metrics: Any) -> None:
    sampling = {"max_completion_length": 32, "top_p": 0.9, "top_k": 20, "sampling_mask": True}
    config = command_line.config("truncated", model__sampling=sampling, model__algorithm__mismatch="truncate_token")
    outcome = command_line(
        "fit", "--config", config, "--model.algorithm.num_minibatches=2", "--model.algorithm.beta=0.01"
    )
    assert outcome.status == 0, outcome.err
    rows = [row for row in read_metrics(command_line.runs / "truncated" / "metrics.csv") if "loss" in row]
    assert rows
    assert all(float(row["sampling/sampling_logp_difference/mean"]) < 1e-4 for row in rows)


def test_what_has_no_record_of_the_support_is_refused(command_line: Any) -> None:
    masked = {"max_completion_length": 32, "top_p": 0.9, "sampling_mask": True}
    child = {"class_path": "grpo_pl.rollout.native.child.NativeChildEngine"}
    for name, changes, message in (
        ("plain", {"model__sampling": {"max_completion_length": 32, "top_p": 0.9}}, "Set sampling_mask true"),
        ("idle", {"model__sampling": {"max_completion_length": 32, "sampling_mask": True}}, "nothing is truncated"),
        ("child", {"model__sampling": masked, "model__engine": child}, "NativeChildEngine does not"),
    ):
        outcome = command_line("fit", "--config", command_line.config(name, **changes))
        assert outcome.status != 0
        assert re.search(message, outcome.err), outcome.err
