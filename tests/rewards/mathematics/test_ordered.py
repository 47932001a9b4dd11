"""Lists without brackets: multisets by default, tuples with ``ordered`` or a column of the data."""

import pytest

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.base import MissingColumn

PAIRS = [
    ("1, 2", "2, 1"),
    (r"\sqrt2, 3", r"3, \sqrt2"),
    ("red, blue", "blue, red"),
    ("1, 2", "1,2"),
    (r"\{1,2\}", "2, 1"),
]


def values(reward: MathReward, columns: dict) -> list[float | None]:
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in PAIRS], [gold for gold, _ in PAIRS], columns)
    return [score.value for score in scores]


def test_the_option_makes_lists_ordered() -> None:
    assert values(MathReward(), {}) == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert values(MathReward(ordered=True), {}) == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_column_decides_for_each_problem() -> None:
    assert values(MathReward(), {"ordered": [True, False, 1, 0, None]}) == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert values(MathReward(ordered=True), {"ordered": [False, None, True, True, True]}) == [1.0, 0.0, 0.0, 1.0, 1.0]
    with pytest.raises(MissingColumn, match="'ordered' must hold true or false, got 'no'"):
        values(MathReward(), {"ordered": ["no"] * 5})
