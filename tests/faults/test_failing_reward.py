"""A reward that raises ends a run that has saved its last completed rollout, or scores None where it may."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.checkpoints import newest_whole

CORRECT = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}
SPARSE = {"every_n_rollouts": 100, "keep_best": 0}


def _failing(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "user_parts.Failing", "init_args": arguments}


def test_the_last_completed_rollout_is_saved_and_gone_on_with(
    command_line: Any, read_metrics: Callable[..., Any]
) -> None:
    whole = command_line.config("whole", checkpoint=SPARSE, model__rewards=[CORRECT, _failing()])
    assert command_line("fit", "--config", whole).status == 0
    config = command_line.config("ill", checkpoint=SPARSE, model__rewards=[CORRECT, _failing(call=4)])
    outcome = command_line("fit", "--config", config)
    run = command_line.runs / "ill"
    saved = run / "checkpoints" / "rollout-000003.ckpt"
    assert outcome.status == 1 and "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("grpo-pl fit: error: RuntimeError: the service is down, raised by the reward 'failing' (")
    assert f"Saved: {saved}; --resume goes on" in last
    assert newest_whole(run / "checkpoints", warn=pytest.fail) == saved
    mended = command_line.config("ill", checkpoint=SPARSE, model__rewards=[CORRECT, _failing()])
    assert command_line("fit", "--config", mended, "--resume").status == 0
    assert read_metrics(run / "metrics.csv") == read_metrics(command_line.runs / "whole" / "metrics.csv")


def test_one_that_may_fail_scores_none_and_is_counted(
    command_line: Any, read_metrics: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    config = command_line.config("may", model__rewards=[CORRECT, _failing(call=2, on_error="none")])
    command_line.done("fit", "--config", config)
    rows = [row for row in read_metrics(command_line.runs / "may" / "metrics.csv") if "reward" in row]
    assert [row.get("rewards/failing/status/unavailable") for row in rows] == [None, "16.0", None, None]
    assert any("'failing' failed and scores None (on_error: none): RuntimeError" in str(w.message) for w in recwarn)


def test_in_validation_as_well(command_line: Any) -> None:
    rewards = [_failing(correctness=True, call=6)]  # two calls before the first rollout, one a rollout, two after 2
    config = command_line.config("held_out", checkpoint=SPARSE, model__rewards=rewards)
    outcome = command_line("fit", "--config", config)
    saved = command_line.runs / "held_out" / "checkpoints" / "rollout-000002.ckpt"
    assert outcome.status == 1 and f"Saved: {saved}" in outcome.err.splitlines()[-1]
    rewards[0]["init_args"]["on_error"] = "none"
    command_line.done("fit", "--config", command_line.config("goes_on", model__rewards=rewards, data__steps=2))


def test_before_the_first_rollout_there_is_nothing_to_save(command_line: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def broken(completions):\n    return 1 / 0\n")
    function = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": f"{file}:broken"}}
    config = command_line.config("first", model__rewards=[CORRECT, function])
    outcome = command_line("fit", "--config", config)
    line = f"ZeroDivisionError: division by zero, raised by the reward function '{file}:broken' ({file}, line 2)"
    assert outcome.status == 1
    tried = "reward 'function' failed before the start, on 8 texts that try it: "
    assert outcome.err.splitlines()[-1] == f"grpo-pl fit: error: {tried}{line}"
    function["init_args"]["on_error"] = "none"
    config = command_line.config("first", model__rewards=[CORRECT, function], data__steps=1)
    assert command_line("fit", "--config", config).status == 0
