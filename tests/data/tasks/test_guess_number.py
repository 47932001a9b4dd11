"""Demonstrated games of GuessTheNumber, played as TextArena plays them."""

import random
from collections.abc import Sequence

import pytest

from grpo_pl.data.tasks.guess_number import GuessNumberPrompts
from grpo_pl.environment import Transition
from grpo_pl.extras.agents import play
from grpo_pl.extras.agents.textarena_games import TextArenaEnvironment

GAME = TextArenaEnvironment(
    id="GuessTheNumber-v0",
    kwargs={"max_number": 15, "max_turns": 20},
    observe="grpo_pl.extras.agents.guess_number:show",
)


def _play(source: GuessNumberPrompts, count: int) -> list[list[Transition]]:
    pytest.importorskip("textarena")
    rng = random.Random(0)
    return [play(GAME, source.demonstrated_actions(p, rng), seed=p.id) for p in source.prompts(0, count=count)]


def _won_within(turns: int, games: Sequence[Sequence[Transition]]) -> float:
    return sum(len(game) <= turns + 1 and game[-1].reward == 1.0 for game in games) / len(games)


def test_every_demonstration_finds_the_number_in_the_end_and_breaks_no_rule() -> None:
    for share in (0.0, 1.0):
        games = _play(GuessNumberPrompts(halving_share=share), 40)
        assert all(game[-1].terminated and game[-1].reward == 1.0 for game in games)
        assert not any(turn.invalid_action for game in games for turn in game)


def test_halving_always_wins_within_four_guesses_and_counting_up_seldom() -> None:
    halving, counting = (_won_within(4, _play(GuessNumberPrompts(halving_share=share), 150)) for share in (1.0, 0.0))
    assert halving == 1.0 and counting == pytest.approx(4 / 15, abs=0.12)


def test_the_policy_reads_where_the_number_can_still_be() -> None:
    pytest.importorskip("textarena")
    number, seed = next(
        (n, seed) for seed in range(20) for n in range(4, 12) if play(GAME, [f"[{n}]"], seed=seed)[-1].reward == 1.0
    )
    turns = play(GAME, [f"[{number - 3}]", f"[{number + 4}]", "[1]", f"[{number - 1}]"], seed=seed)
    low, high = number - 2, number + 3
    seen = ["1-15", f"{low}-15", f"{low}-{high}", f"{low}-{high}", f"{number}-{high}"]
    assert [turn.observation for turn in turns] == seen
    for broken in ("[99]", "what?"):
        turn = play(GAME, [broken], seed=seed)[-1]
        assert turn.observation == "1-15" and turn.invalid_action
