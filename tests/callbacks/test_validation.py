"""Held-out numbers before the first rollout and after the last, each once, whatever the interval."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHORT: dict[str, Any] = {
    "model__cold_start": None,
    "model__sampling": {"max_completion_length": 4},
    "data__steps": 3,
}


def _pattern(command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]], name: str, **changes: Any) -> str:
    """The rows of a run in order: v for a validation, t for a rollout."""
    command_line.done("fit", "--config", command_line.config(name, **{**SHORT, **changes}))
    rows = read_metrics(command_line.runs / name / "metrics.csv")
    return "".join("v" if "val/pass@1" in row else "t" for row in rows)


@pytest.mark.parametrize(("interval", "pattern"), [(1, "vtvtvtv"), (2, "vttvtv"), (3, "vtttv"), (50, "vtttv")])
def test_both_ends_are_validated_once(command_line: Any, read_metrics: Any, interval: int, pattern: str) -> None:
    trainer = {"accelerator": "cpu", "val_check_interval": interval}
    assert _pattern(command_line, read_metrics, f"every_{interval}", trainer=trainer) == pattern


def test_a_run_without_any_update_is_validated_at_its_end_too(command_line: Any, read_metrics: Any) -> None:
    rewards = [{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}]  # all 0
    trainer = {"accelerator": "cpu", "val_check_interval": 50}
    assert _pattern(command_line, read_metrics, "idle", model__rewards=rewards, trainer=trainer) == "vtttv"


def test_several_updates_a_rollout_do_not_move_the_interval(command_line: Any, read_metrics: Any) -> None:
    algorithm = {"group_size": 4, "beta": 0.0, "num_iterations": 3}
    assert _pattern(command_line, read_metrics, "busy", model__algorithm=algorithm) == "vttvtv"
