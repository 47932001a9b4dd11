"""Runs whose long completions are drawn over several steps: schedule, age of tokens, resume, and what is refused."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("forked")
ReadMetrics = Callable[..., list[dict[str, str]]]
SHORT: dict[str, Any] = {
    "data__steps": 4,
    "data__val_prompts": 2,
    "trainer__val_check_interval": 4,
}


def fit(command_line: Any, name: str, *options: str, part: int = 4, in_flight: int = 2, **changes: Any) -> Any:
    parts = {"part_length": part, "steps_in_flight": in_flight}
    settings = SHORT | {"model__partial_rollouts": parts} | changes
    return command_line("fit", "--config", command_line.config(name, **settings), *options)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["reward"]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return {name: tensor for name, tensor in state["state_dict"].items() if torch.is_tensor(tensor)}


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    outcome = fit(command_line, "parts")
    assert outcome.status == 0, outcome.err
    return Path(command_line.runs / "parts")


def test_completions_go_on_under_newer_weights_and_none_is_left_at_the_end(run: Path) -> None:
    found = rows(run)
    assert len(found) == 4
    ages = [float(row["sampling/staleness"]) for row in found]
    carried = [float(row["rollout/carried_completions"]) for row in found]
    assert ages[0] == 0.0 and max(ages) > 0.0
    assert carried[-1] == 0.0 and max(carried) > 0.0
    ratios = [float(row["sampling/importance_sampling_ratio/mean"]) for row in found]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6) and any(abs(ratio - 1.0) > 1e-4 for ratio in ratios)


def test_one_step_in_flight_is_the_run_without_parts(command_line: Any, read_metrics: ReadMetrics) -> None:
    plain: dict[str, Any] = {"model__algorithm": {"group_size": 4, "beta": 0.0, "mismatch": "none"}}
    assert fit(command_line, "in_parts", in_flight=1, **plain).status == 0
    assert fit(command_line, "whole", model__partial_rollouts=None, **plain).status == 0
    more = {"sampling/staleness", "rollout/carried_completions"}
    in_parts = [
        {name: value for name, value in row.items() if name not in more}
        for row in read_metrics(command_line.runs / "in_parts/metrics.csv")
    ]
    whole = read_metrics(command_line.runs / "whole/metrics.csv")
    assert len(whole) == len(in_parts)
    for one, other in zip(in_parts, whole, strict=True):
        assert one.keys() == other.keys()
        assert {n: float(v) for n, v in one.items() if v} == pytest.approx(
            {n: float(v) for n, v in other.items() if v}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_resumed_run_is_the_undisturbed_one(
    command_line: Any, run: Path, read_metrics: ReadMetrics, stopped_after: int
) -> None:
    name = f"resumed_{stopped_after}"
    first = fit(command_line, name, "--checkpoint.every_n_rollouts=1", f"--trainer.limit_train_batches={stopped_after}")
    assert first.status == 0, first.err
    outcome = fit(command_line, name, "--checkpoint.every_n_rollouts=1", "--resume")
    assert outcome.status == 0, outcome.err
    expected = weights(run)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(command_line.runs / name).items())
    ages = [row["sampling/staleness"] for row in rows(command_line.runs / name)]
    assert ages == [row["sampling/staleness"] for row in rows(run)]


def test_an_engine_with_a_copy_is_held_to_its_newest_tokens(command_line: Any, run: Path) -> None:
    outcome = fit(command_line, "child", model__engine={"class_path": "NativeChildEngine"})
    assert outcome.status == 0, outcome.err
    found = rows(command_line.runs / "child")
    errors = [float(row["sampling/sync_error"]) for row in found if row["sampling/sync_error"]]
    assert len(errors) >= 3 and max(errors) < 1e-5
    assert [row["sampling/staleness"] for row in found] == [row["sampling/staleness"] for row in rows(run)]


def test_weights_that_are_dropped_are_noticed_although_what_is_trained_on_is_older(command_line: Any) -> None:
    """Everything fits one part, so that each update takes what the step before has drawn."""
    keeping = {"class_path": "child_engines.KeepingEngine"}
    outcome = fit(command_line, "keeping", part=64, model__engine=keeping, model__optimization={"lr": 0.01})
    assert outcome.status == 1
    assert "rollout 2 was not drawn from the policy's weights" in outcome.err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data__staleness": 1}, "data.staleness"),
        ({"model__algorithm": {"group_size": 4, "dynamic_sampling": True}}, "model.algorithm.dynamic_sampling"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_one_line(
    command_line: Any, changes: dict[str, Any], field: str
) -> None:
    outcome = fit(command_line, "refused", **changes)
    assert outcome.status == 1
    assert f"model.partial_rollouts does not go with {field}: leave out one of the two." in outcome.err
