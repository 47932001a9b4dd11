"""The reward of subset sum: numbers that are there, and their sum."""

import pytest

from grpo_pl.rewards import Score, SubsetSumReward


def scored(answer: str) -> Score:
    completion = f"<think>9+7=16</think><answer>{answer}</answer>"
    return SubsetSumReward()([completion], ["23"], {"numbers": [[12, 9, 7, 7, 4]]})[0]


@pytest.mark.parametrize(
    "answer",
    [
        "12+7+4",
        "7 + 12 + 4",
        "9+7+7",
        "12, 7, 4",
        "\\boxed{4+7+12}",
        "12+7+4=23",
        "$12 + 7 + 4 = 23$",
        "\\{12, 7, 4\\}",
    ],
)
def test_given_numbers_that_add_up_are_right(answer: str) -> None:
    assert scored(answer).value == 1.0


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("12+9", "21 instead of 23"),
        ("9+9+4", "chooses 9 9 4 of 12 9 7 7 4"),  # 9 is there once
        ("23", "chooses 23 of 12 9 7 7 4"),
        ("12+7+4=24", "says 24 instead of 23"),
        ("12+7=4=23", "more than an equation with the target at its end"),
        ("=23", "no whole numbers with + between them"),
        ("12*2", "no whole numbers with + between them"),
        ("9-7", "no whole numbers with + between them"),
        ("12+7+4.0", "no whole numbers with + between them"),
    ],
)
def test_anything_else_is_wrong(answer: str, detail: str) -> None:
    assert scored(answer) == Score(0.0, "wrong", detail)
