"""Maps of frozen lakes: always a way, splits that share nothing, and demonstrations that Gymnasium agrees with."""

import random
from collections import Counter

import pytest

from grpo_pl.data.curriculum import CurriculumPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.tasks.frozen_lake import FrozenLakePrompts
from grpo_pl.extras.agents import episode_value, play
from grpo_pl.extras.agents.gymnasium_ids import GymnasiumEnvironment

LAKE = GymnasiumEnvironment(
    id="FrozenLake-v1",
    kwargs={"is_slippery": False, "render_mode": "ansi"},
    from_row=["desc"],
    observe="grpo_pl.extras.agents.frozen_lake:show",
    parse="grpo_pl.extras.agents.frozen_lake:parse",
    isolation="thread",
)


def test_maps_begin_and_end_where_they_should_and_are_told_apart_by_their_number() -> None:
    problems = FrozenLakePrompts().prompts(0, count=200)
    assert len({p.id for p in problems}) == len({"".join(p.columns["desc"]) for p in problems}) == 200
    for problem in problems:
        rows = problem.columns["desc"]
        assert [len(row) for row in rows] == [4] * 4 and rows[0][0] == "S" and rows[3][3] == "G"
        assert problem.id == sum(1 << i for i, tile in enumerate("".join(rows)) if tile == "H")


def test_a_good_demonstration_goes_a_shortest_way_and_a_stroll_mostly_fails() -> None:
    pytest.importorskip("gymnasium")
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    for problem in FrozenLakePrompts().prompts(0, count=60):
        way = FrozenLakePrompts(good_share=1.0).demonstrated_actions(problem, rng)
        turns = play(LAKE, way, row=problem.columns)
        assert turns[-1].terminated and episode_value(turns) == 1.0 and len(turns) == len(way) + 1
        stroll = FrozenLakePrompts(good_share=0.0).demonstrated_actions(problem, rng)
        turns = play(LAKE, stroll, row=problem.columns)
        assert len(turns) == len(stroll) + 1 and not any(turn.invalid_action for turn in turns)
        outcomes[turns[-1].terminated, episode_value(turns)] += 1  # type: ignore[index]
    assert outcomes[True, 0.0] > 30 and outcomes[True, 1.0] < 10  # type: ignore[index]


def test_a_shortest_way_is_no_longer_than_any_other() -> None:
    (problem,) = FrozenLakePrompts(holes=0.0).prompts(0, count=1)
    ways = [FrozenLakePrompts(good_share=1.0).demonstrated_actions(problem, random.Random(i)) for i in range(40)]
    assert {tuple(sorted(way)) for way in ways} == {("down",) * 3 + ("right",) * 3}
    assert len(set(map(tuple, ways))) > 10  # of twenty


def test_demonstrations_reach_through_mixtures_and_curricula() -> None:
    source = FrozenLakePrompts(good_share=1.0)
    mixed = MixturePrompts(parts={"lake": source})
    for outer in (mixed, CurriculumPrompts(source=mixed)):
        (problem,) = outer.prompts(0, count=1)
        assert outer.demonstrated_actions(problem, random.Random(0))
