"""Rollouts that older weights drew, whole or in part: two processes make the run of one, also from a checkpoint on."""

from pathlib import Path

import pytest

from tests.distributed.conftest import STRATEGIES, Calls, assert_nearly_equal, grpo_pl

pytestmark = pytest.mark.usefixtures("forked")
SLOW = pytest.mark.slow


@SLOW  # from a checkpoint on by default: below
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["ahead", "in_parts"])
def test_samples_and_metrics_are_those_of_one_process(
    completed: Calls, feature: Calls, read_metrics: Calls, kind: str, name: str
) -> None:
    ours, single = completed(name, feature(kind)), completed("single", feature(kind))
    assert ours.samples() == single.samples()
    assert_nearly_equal(read_metrics(ours.metrics), read_metrics(single.metrics))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("ahead", "single", "fsdp"), pytest.param("ahead", "ddp", "single", marks=SLOW), ("in_parts", "single", "ddp")],
)
def test_what_a_checkpoint_holds_goes_on_in_another_number_of_processes(
    completed: Calls,
    command: Calls,
    feature: Calls,
    read_metrics: Calls,
    tmp_path: Path,
    kind: str,
    before: str,
    after: str,
) -> None:
    whole = completed(before, feature(kind))
    resumed = whole.copy_until(3, tmp_path / "runs")
    flags = [f"--config={feature(kind)}", *STRATEGIES[after], "--resume"]
    command(tmp_path / "runs", "fit", *flags, world=1 if after == "single" else 2)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= 3]
    rows = read_metrics(resumed.metrics)
    assert_nearly_equal(rows, read_metrics(whole.metrics))
    trained = [row for row in rows if "loss" in row]
    if kind == "ahead":
        assert [float(row["sampling/staleness"]) for row in trained] == [0, 1, 2, 2, 2]
        assert max(float(row["sampling/sync_error"]) for row in trained) < 1e-5
    else:
        assert any(float(row["rollout/carried_completions"]) > 0 for row in trained)


def test_what_no_checkpoint_may_hold_ends_all_processes_before_they_exchange_anything(
    start: Calls, feature: Calls, tmp_path: Path
) -> None:
    """A problem of the second process, met when the first has begun to train."""
    file = tmp_path / "late.yaml"
    plain = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
    file.write_text(feature("ahead").read_text().replace(plain, "user_parts.LateDate"))
    _, finish = start(
        grpo_pl, tmp_path / "runs", "fit", f"--config={file}", *STRATEGIES["ddp"], "--model.cold_start.steps=1"
    )
    ended = finish()
    assert ended.status == [1, 1], ended.log(0) + ended.log(1)
    assert "column 'day' of problem" in ended.log(0) and "column 'day' of problem" in ended.log(1)
    assert "another process failed" in ended.log(0)
