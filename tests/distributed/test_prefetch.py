"""Rollouts that older weights drew, whole or in part: two processes make the run of one, also from a checkpoint on."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("forked")
STRATEGIES = {"ddp": ["--config=configs/strategy/ddp.yaml"], "fsdp": ["--config=configs/strategy/fsdp.yaml"]}


@pytest.fixture(scope="session")
def ahead(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of these runs."""
    file = tmp_path_factory.mktemp("ahead") / "ahead.yaml"
    file.write_text(five_rollouts.read_text().replace("  steps: 5\n", "  steps: 5\n  staleness: 2\n"))
    return file


@pytest.fixture(scope="session")
def in_parts(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose completions take several steps."""
    file = tmp_path_factory.mktemp("in_parts") / "in_parts.yaml"
    parts = "model:\n  partial_rollouts: {part_length: 3, steps_in_flight: 2}\n"
    assert five_rollouts.read_text().count("model:\n") == 1
    file.write_text(five_rollouts.read_text().replace("model:\n", parts))
    return file


def _assert_nearly_equal(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> None:
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if key != "sampling/sync_error":  # of other completions
                assert float(mine[key]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), (key, other["step"])


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_samples_and_metrics_are_those_of_one_process(
    completed: Callable[..., Any], ahead: Path, read_metrics: Callable[..., Any], name: str
) -> None:
    ours, single = completed(name, ahead), completed("single", ahead)
    assert ours.samples() == single.samples()
    steps = [read_metrics(run.metrics) for run in (ours, single)]
    _assert_nearly_equal(*steps)
    found = [(float(row["sampling/staleness"]), float(row["sampling/sync_error"])) for row in steps[0] if "loss" in row]
    assert [age for age, _ in found] == [0, 1, 2, 2, 2] and max(error for _, error in found) < 1e-5


@pytest.mark.parametrize(
    ("before", "after"), [("single", "fsdp"), pytest.param("ddp", "single", marks=pytest.mark.slow)]
)
def test_the_rollouts_of_a_checkpoint_are_cut_for_another_number_of_processes(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    ahead: Path,
    read_metrics: Callable[..., Any],
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    whole = completed(before, ahead)
    resumed = whole.copy_until(2, tmp_path / "runs")
    flags = [f"--config={ahead}", *STRATEGIES.get(after, []), "--resume"]
    command(tmp_path / "runs", "fit", *flags, world=1 if after == "single" else 2)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= 2]
    _assert_nearly_equal(read_metrics(resumed.metrics), read_metrics(whole.metrics))


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_processes_carry_the_same_completions_over(
    completed: Callable[..., Any], in_parts: Path, read_metrics: Callable[..., Any], name: str
) -> None:
    ours, single = completed(name, in_parts), completed("single", in_parts)
    assert ours.samples() == single.samples()
    steps = [read_metrics(run.metrics) for run in (ours, single)]
    _assert_nearly_equal(*steps)
    assert any(float(row["rollout/carried_completions"]) > 0 for row in steps[0] if "loss" in row)


def test_what_is_carried_over_goes_on_in_another_number_of_processes(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    in_parts: Path,
    read_metrics: Callable[..., Any],
    tmp_path: Path,
) -> None:
    whole = completed("single", in_parts)
    resumed = whole.copy_until(2, tmp_path / "runs")
    command(tmp_path / "runs", "fit", f"--config={in_parts}", *STRATEGIES["ddp"], "--resume", world=2)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= 2]
    _assert_nearly_equal(read_metrics(resumed.metrics), read_metrics(whole.metrics))


def _fit(folder: Path, cache: Path, *args: object) -> int:
    from grpo_pl.cli.main import main

    os.environ["GRPO_PL_CACHE"] = str(cache)
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
    return main(["fit", *map(str, args), f"--runs_dir={folder}"])


def test_what_no_checkpoint_may_hold_ends_all_processes_before_they_exchange_anything(
    start: Callable[..., Any], ahead: Path, tmp_path: Path
) -> None:
    """A problem of the second process, met when the first has begun to train."""
    file = tmp_path / "late.yaml"
    plain = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
    file.write_text(ahead.read_text().replace(plain, "user_parts.LateDate"))
    _, finish = start(_fit, tmp_path / "runs", f"--config={file}", *STRATEGIES["ddp"])
    ended = finish()
    assert ended.status == [1, 1], ended.log(0) + ended.log(1)
    assert "column 'day' of problem" in ended.log(0) and "column 'day' of problem" in ended.log(1)
    assert "another process failed" in ended.log(0)
