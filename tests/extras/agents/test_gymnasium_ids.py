"""Gymnasium's environments through text."""

from typing import Any

import pytest

from grpo_pl.extras.agents import EnvironmentPool, episode_value, play
from grpo_pl.extras.agents.frozen_lake import parse, show
from grpo_pl.extras.agents.gymnasium_ids import GymnasiumEnvironment
from tests.extras.agents.turns import reset, step

pytest.importorskip("gymnasium")

MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
WAY = ["down", "down", "right", "right", "down", "right"]


def lake(**changes: Any) -> GymnasiumEnvironment:
    settings: dict[str, Any] = {
        "id": "FrozenLake-v1",
        "kwargs": {"is_slippery": False, "render_mode": "ansi"},
        "from_row": ["desc"],
        "observe": "grpo_pl.extras.agents.frozen_lake:show",
        "parse": parse,
    }
    return GymnasiumEnvironment(**(settings | changes))


def test_a_map_of_the_row_is_walked_to_its_goal() -> None:
    turns = play(lake(), WAY, row={"desc": MAP})
    assert turns[0].observation == "@FFF\nFHFH\nFFFH\nHFFG"
    assert turns[1].observation == "SFFF\n@HFH\nFFFH\nHFFG"
    assert turns[-1].terminated and episode_value(turns) == 1.0
    fallen = play(lake(), ["down", "Right "], row={"desc": MAP})
    assert fallen[-1].terminated and episode_value(fallen) == 0.0


def test_equal_fields_are_equal_states_whatever_the_way_to_them() -> None:
    one = play(lake(), ["right", "left", "down"], row={"desc": MAP})
    other = play(lake(), ["up", "down"], row={"desc": MAP})
    assert one[-1].state == other[-1].state != one[-2].state


def test_an_action_that_means_nothing_changes_nothing_and_is_marked() -> None:
    turns = play(lake(), ["down", "sideways"], row={"desc": MAP})
    assert turns[2].invalid_action and turns[2].reward == 0.0 and not turns[2].done
    assert turns[2].observation == f"Invalid action.\n{turns[1].observation}" and turns[2].state == turns[1].state


def test_nothing_may_be_said_of_such_an_action() -> None:
    turns = play(lake(invalid=""), ["down", "sideways"], row={"desc": MAP})
    assert turns[2].invalid_action and turns[2].observation == turns[1].observation
    messages = lake(invalid="", observe=lambda env, seen: [{"role": "user", "content": str(seen)}])
    turns = play(messages, ["down", "sideways"], row={"desc": MAP})
    assert turns[2].observation == turns[1].observation == [{"role": "user", "content": "4"}]


def test_without_a_renderer_and_a_parser_the_plain_ones_serve() -> None:
    turns = play(lake(observe=None, parse=None), ["I go 1, not 2", "none"], row={"desc": MAP})
    assert "\x1b" not in str(turns[0].observation) and "SFFF" in str(turns[0].observation)
    assert "(Down)" in str(turns[1].observation) and turns[2].invalid_action
    cards = GymnasiumEnvironment(id="Blackjack-v1")
    first, again = (play(cards, [], seed=3)[0] for _ in range(2))
    assert first == again and str(first.observation).startswith("(")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_seed_decides_what_is_random(isolation: Any) -> None:
    slippery = lake(kwargs={"is_slippery": True, "render_mode": "ansi"}, isolation=isolation)
    walks: list[list[str]] = []
    with EnvironmentPool(slippery) as pool:
        for seed in (-5, -5, 0, 1, 2, 3):
            start = reset(pool, 0, seed=seed, desc=["SFFF", "FFFF", "FFFF", "FFFG"])
            walks.append([start[0].state, *(step(pool, {0: "down"})[0].state for _ in range(6))])
            pool.release(0)
    assert walks[0] == walks[1]
    assert len(set(map(tuple, walks[2:]))) > 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "FrozenLak-v1", "from_row": ()}, "FrozenLak"),
        ({"id": "FrozenLake-v1", "from_row": (), "kwargs": {"slippery": True}}, "slippery"),
        ({"id": "Taxi-v3", "from_row": (), "kwargs": {}}, "Taxi-v3"),
    ],
)
def test_what_gymnasium_cannot_make_is_refused_in_one_line(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        lake(**settings).prepare()
    assert "\n" not in str(refused.value)


def test_a_column_that_the_prompt_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"column 'desc', and the prompt has \['map'\]"):
        play(lake(), [], row={"map": MAP})


def test_the_player_is_shown_on_the_map() -> None:
    import gymnasium

    env = gymnasium.make("FrozenLake-v1", desc=MAP)
    assert show(env, 15) == "SFFF\nFHFH\nFFFH\nHFF@"
    assert [parse(word, None) for word in ("left", " UP\n", "north", "")] == [0, 3, None, None]
