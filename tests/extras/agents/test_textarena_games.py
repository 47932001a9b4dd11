"""Games of TextArena, each in a process of its own."""

import re
from typing import Any

import pytest

from grpo_pl.extras.agents import EnvironmentPool, Transition
from grpo_pl.extras.agents.textarena_games import TextArenaEnvironment
from tests.extras.agents.turns import reset, step

pytest.importorskip("textarena")


def guess(pool: EnvironmentPool, seeds: dict[int, int]) -> dict[int, list[Transition]]:
    """Halves the interval until the number is found."""
    turns: dict[int, list[Transition]] = {}
    ends = {episode: (1, 20) for episode in seeds}
    for episode, seed in seeds.items():
        pool.reset(episode, seed=seed, row={})
    turns = {episode: [turn] for episode, turn in pool.collect_all().items()}
    while going := [e for e, played in turns.items() if not played[-1].done]:
        for episode, turn in step(pool, {episode: f"[{sum(ends[episode]) // 2}]" for episode in going}).items():
            low, high = ends[episode]
            middle = (low + high) // 2
            ends[episode] = (middle + 1, high) if "higher" in str(turn.observation) else (low, middle - 1)
            turns[episode].append(turn)
    return turns


def test_games_side_by_side_are_won_and_equal_seeds_are_equal_games() -> None:
    with EnvironmentPool(TextArenaEnvironment(id="GuessTheNumber-v0")) as pool:
        turns = guess(pool, {0: 1, 1: 2, 2: 1, 3: 5})
    assert all(played[-1].terminated and played[-1].reward == 1.0 for played in turns.values())
    assert turns[0] == turns[2]
    assert len({len(played) for played in turns.values()}) > 1  # other numbers
    assert re.search("between 1 and 20", str(turns[0][0].observation))
    assert str(turns[0][1].observation) in ("The target number is higher.", "The target number is lower.") or (
        len(turns[0]) == 2
    )  # news alone: neither the history nor the own action


def test_a_move_that_means_nothing_is_marked() -> None:
    with EnvironmentPool(TextArenaEnvironment(id="GuessTheNumber-v0", kwargs={"max_turns": 3})) as pool:
        assert "within 3 turns" in str(reset(pool, 0)[0].observation)
        assert step(pool, {0: "seven"})[0].invalid_action
        end = step(pool, {0: "eight"})[0]
        assert end.invalid_action and end.terminated


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "GuessTheNumbr-v0"}, "did you mean 'GuessTheNumber-v0'"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"most": 3}}, "most"),
        ({"id": "TicTacToe-v0"}, "alone"),
    ],
)
def test_what_cannot_be_played_alone_is_refused_in_one_line(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        TextArenaEnvironment(**settings).prepare()
    assert "\n" not in str(refused.value)


def test_a_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="isolation must be 'process'"):
        TextArenaEnvironment(id="GuessTheNumber-v0", isolation="thread")
