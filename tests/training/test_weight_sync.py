"""An engine that keeps a copy of the weights cannot draw from old ones unnoticed."""

import csv
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import MathReward
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.training.weight_sync import OutOfSync, WeightSyncCheck
from grpo_pl.types import Problem, PromptBatch

pytestmark = pytest.mark.usefixtures("forked")

ReadMetrics = Callable[..., list[dict[str, str]]]
SHORT = {"data__steps": 3, "data__val_prompts": 2, "trainer__val_check_interval": 3}


def _fit(command_line: Any, name: str, engine: str | None, *options: str) -> Any:
    changes = {} if engine is None else {"model__engine": {"class_path": f"child_engines.{engine}"}}
    return command_line("fit", "--config", command_line.config(name, **SHORT, **changes), *options)


def _errors(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["sampling/sync_error"]) for row in csv.DictReader(file) if row["reward"]]


@pytest.fixture(scope="module")
def in_child(command_line: Any) -> Path:
    """A whole run that draws in a child process."""
    outcome = _fit(command_line, "child", "NativeInChild")
    assert outcome.status == 0, outcome.err
    return Path(command_line.runs / "child")


def test_a_run_in_a_child_process_is_the_run_without_one_and_proves_every_step(
    command_line: Any, in_child: Path, read_metrics: ReadMetrics
) -> None:
    assert _fit(command_line, "here", None).status == 0
    own = [
        {k: v for k, v in row.items() if k != "sampling/sync_error"} for row in read_metrics(in_child / "metrics.csv")
    ]
    assert own == read_metrics(command_line.runs / "here/metrics.csv")
    errors = _errors(in_child)
    assert len(errors) == 3 and max(errors) < 1e-5


def test_a_push_that_was_skipped_ends_the_run_and_names_both_versions(command_line: Any) -> None:
    outcome = _fit(command_line, "forgetting", "ForgettingEngine", "--checkpoint.every_n_rollouts=25")
    assert outcome.status == 1
    assert (command_line.runs / "forgetting/checkpoints/rollout-000001.ckpt").exists()
    assert re.search(r"rollout 2 was not drawn from .* has had 1 updates, and .* that after 0;", outcome.err), (
        outcome.err
    )
    assert "Traceback" not in outcome.err


def test_weights_that_were_lost_on_their_way_are_noticed_by_what_is_drawn(command_line: Any) -> None:
    outcome = _fit(command_line, "keeping", "KeepingEngine")
    assert outcome.status == 1
    found = re.search(r"rollout 2 was not drawn .* that after 1; .* differ by (\S+) on .* and (\S+) is", outcome.err)
    assert found, outcome.err
    assert float(found[1]) > 10 * float(found[2])


def collected_by(make_experience: Any) -> Any:
    """Two completions of one prompt, with the log-probabilities that the policy gives them."""
    return make_experience(
        {0: ["2", "11"]},
        batch=PromptBatch(step=0, prompts=[Problem(id=0, question="1+1=", answer="2")], valid=[True]),
        rewards=[MathReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=2, beta=0.0),
        max_completion_length=4,
    )


@pytest.mark.parametrize(
    ("dtype", "errors", "refused"),
    [
        ("float32", [1e-6, 9e-5, 1.1e-4], 2),  # below 1e-4 everything is rounding
        ("float32", [1e-3, 9e-3, 1.1e-2], 2),  # ten times the first
        ("float32", [2e-2], 0),  # no rounding of float32
        ("float32", [1e-6, float("nan")], 1),
        ("bfloat16", [2e-2, 1e-3, 7.8e-2, 8.2e-2], 3),  # four times the first
        ("bfloat16", [0.25], 0),
    ],
)
def test_an_error_is_held_to_a_multiple_of_the_first(
    make_experience: Any, tiny_policy: Any, dtype: str, errors: list[float], refused: int
) -> None:
    """Log-probabilities that an engine reports, off by a given amount on average, and tokens that nobody wrote."""
    found = collected_by(make_experience)
    exact, engine, proof = found.rollout.sampling_logprobs.clone(), PlainEngine(), WeightSyncCheck()
    engine.weights_version, engine.dtype = 0, dtype  # type: ignore[attr-defined]
    for number, error in enumerate(errors):
        rollout = replace(found.rollout, sampling_logprobs=exact + error)
        collected = replace(found, samples=replace(found.samples, rollout=rollout))
        with pytest.raises(OutOfSync) if number == refused else nullcontext():
            proof.check(tiny_policy, collected.samples, {}, engine, 1.0, Collective())
            assert proof.metrics["sampling/sync_error"] == pytest.approx(error, rel=0.05)


def test_a_rollout_that_compares_nothing_sets_no_bound(make_experience: Any, tiny_policy: Any) -> None:
    found = collected_by(make_experience)
    rollout, engine, proof = found.rollout, PlainEngine(), WeightSyncCheck()
    engine.weights_version = 0
    nobody = torch.zeros_like(rollout.completion_mask)  # as if every episode had failed before its first action
    for mask, error in ((nobody, 0.0), (rollout.action_mask, 5e-3)):
        said = replace(rollout, action_mask=mask, sampling_logprobs=rollout.sampling_logprobs + error)
        collected = replace(found, samples=replace(found.samples, rollout=said))
        proof.check(tiny_policy, collected.samples, {}, engine, 1.0, Collective())
        assert bool(proof.metrics) == bool(error)


def test_an_engine_that_dies_twice_in_a_rollout_ends_the_run_with_its_last_lines(command_line: Any) -> None:
    outcome = _fit(command_line, "dying", "DyingEngine")
    assert outcome.status == 1
    assert "exit status 134" in outcome.err and "std::bad_alloc" in outcome.err
    assert "Traceback" not in outcome.err
