"""Episodes of several turns: one process, DDP on two and FSDP2 on two play the same ones, and so does a resumed run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PLAY, ASKS = (Path(__file__).parents[1] / "plugins" / name for name in ("down.yaml", "asks.yaml"))


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_episodes_and_figures_are_those_of_one_process(like_one_process: Callable[..., Any], name: str) -> None:
    single = like_one_process(name, PLAY, rollouts=4)
    assert len(single.samples()) == 4 * 4
    assert any("\n" in text for _, _, texts in single.samples() for text in texts)  # some went on after a first turn


@pytest.mark.slow
def test_agents_that_answer_when_they_like_are_answered_as_in_one_process(like_one_process: Callable[..., Any]) -> None:
    assert len(like_one_process("ddp", ASKS, rollouts=4).samples()) == 4 * 4


@pytest.mark.parametrize("config", [PLAY, pytest.param(ASKS, marks=pytest.mark.slow)])
def test_a_resumed_run_of_episodes_ends_bit_for_bit_alike(
    config: Path,
    completed: Callable[..., Any],
    command: Callable[..., Any],
    read_metrics: Callable[..., Any],
    tmp_path: Path,
) -> None:
    whole = completed("single", config)
    resumed = whole.copy_until(2, tmp_path / "runs")
    command(tmp_path / "runs", "fit", f"--config={config}", "--resume", world=1)
    for key, value in whole.state(4)["state_dict"].items():
        assert torch.equal(resumed.state(4)["state_dict"][key], value), key
    assert read_metrics(resumed.metrics) == read_metrics(whole.metrics)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= 2]
