"""Episodes of several turns: one process, DDP on two and FSDP2 on two play the same ones."""

from pathlib import Path

import pytest

from tests.distributed.conftest import Calls

PLAY, ASKS = (Path(__file__).parents[1] / "plugins" / name for name in ("down.yaml", "asks.yaml"))


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_episodes_and_figures_are_those_of_one_process(like_one_process: Calls, name: str) -> None:
    single = like_one_process(name, PLAY, rollouts=4)
    assert len(single.samples()) == 4 * 4
    assert any("\n" in text for _, _, texts in single.samples() for text in texts)  # some went on after a first turn


@pytest.mark.slow
def test_agents_that_answer_when_they_like_are_answered_as_in_one_process(like_one_process: Calls) -> None:
    assert len(like_one_process("ddp", ASKS, rollouts=4).samples()) == 4 * 4
