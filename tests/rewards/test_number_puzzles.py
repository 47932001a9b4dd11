"""Rewards of number puzzles: exact values, each number as often as it is there, and nothing but an answer."""

# ruff: noqa: E501

from fractions import Fraction

import pytest

from grpo_pl.rewards import CountdownReward, Score, SubsetSumReward
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.number_puzzles import evaluate


def scored(answer: str, target: int = 46, numbers: tuple[int, ...] = (7, 7, 3)) -> Score:
    completion = f"<think>7*7=49</think><answer>{answer}</answer>"
    return CountdownReward()([completion], [str(target)], {"numbers": [list(numbers)]})[0]


@pytest.mark.parametrize(
    "answer",
    ["(7*7)-3", "7*7-3", " ( 7 * 7 ) - 3 ", "(7)*7-3", "7×7−3", "07*7-03", "\\boxed{7*7-3}", "7*7-3=46", "7*7-3 = 046",
     "7 \\times 7 - 3", "7\\times7-3=46", "7\\cdot 7-3", "\\boxed{7 \\cdot 7 - 3 = 46}", "$7\\times 7-3$", "\\(7⋅7–3=46\\)",
     "\\left(7\\times7\\right)-3", "\\bigl[7 \\ast 7\\bigr]\\,-\\,3", "{7}\\cdot{7}-3", "[7*7]-3", "\\boxed{\\boxed{7*7-3}}",
     "\\displaystyle 7 \\times 7 \\quad - 3", "（7＊7）-3", "7\\times{}7-3 \\,=\\, 46", "$$7 \\times 7 - 3 = 46$$",
     "7*7-3.", "7*7-3=46.", "7*7-3 .", "$7*7-3$.", "$7*7-3.$", "\\[7\\times 7-3=46.\\]", "\\boxed{7*7-3.}", "7*7-3.\\,\n"],
)  # fmt: skip
def test_an_expression_of_all_numbers_that_reaches_the_target_is_right(answer: str) -> None:
    assert scored(answer) == Score(1.0, "ok", "46")


def test_division_is_exact() -> None:
    assert scored("(7-3)/(2/3)", 6, (2, 3, 3, 7)).value == 1.0  # 4 / (2/3)
    assert scored("1/49*49", 1, (1, 49, 49)).value == 1.0  # in floating point 0.9999999999999999
    assert scored("\\frac{7-3}{\\frac{2}{3}}", 6, (2, 3, 3, 7)).value == 1.0
    assert scored("(7-3)\\div\\left(\\dfrac23\\right)=6", 6, (2, 3, 3, 7)).value == 1.0
    assert scored("(7-3)÷\\tfrac 2{3}", 6, (2, 3, 3, 7)).value == 1.0
    assert scored("\\frac{7\\times 3}{3}-2=5", 5, (2, 3, 3, 7)).value == 1.0
    assert scored("3-7=-4", -4, (3, 7)).value == 1.0
    assert evaluate("1/3+1/6") == (Fraction(1, 2), [1, 3, 1, 6])


WRONG = {
    "7*7+3": "52 instead of 46", "7*7-6/2": "uses 7 7 6 2 of 7 7 3", "49-3": "uses 49 3 of 7 7 3",
    "7*7-3+7-7": "uses 7 7 3 7 7 of 7 7 3", "46": "uses 46 of 7 7 3", "7*7-3=47": "says 47 instead of 46",
    "7*3=46": "uses 7 3 of 7 7 3", "46.": "uses 46 of 7 7 3",
    **dict.fromkeys(
        ("7*7=49-3=46", "7*7-3=40+6", "46=7*7-3", "7*7-3="), "more than an equation with the target at its end"
    ),
    **dict.fromkeys(
        ("=46", "7\\times\\times 7-3", "7\\cdot\\cdot7-3", "\\frac{7}7\\cdot", "7(7)-3", "\\text{7*7-3}", "7\\timesx 7-3",
         "7^{7}-3", "7**7-3", "7//7-3", "7/(7-7)", "(7*7-3", "7*7-0x3", "7*7-3,", "forty-six",
         "7\\frac{7}{3}",  # a mixed number, or a product?
         "-3+7*7",  # there is no number -3
         "7*7-٣"),  # an Arabic digit
        "no expression of whole numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "detail"), WRONG.items())
def test_anything_else_is_wrong(answer: str, detail: str) -> None:
    assert scored(answer) == Score(0.0, "wrong", detail)


def test_thoughts_alone_are_no_answer_and_long_ones_are_not_read() -> None:
    assert CountdownReward()(["<think>7*7-3=46"], ["46"], {"numbers": [[7, 7, 3]]})[0].status == "no_answer"
    assert scored("(" * 150 + "7" + ")" * 150).status == "too_long"
    assert scored("(" * 95 + "7*7-3" + ")" * 95).value in (0.0, 1.0)  # as deep as Python's parser goes


def test_what_the_policy_cannot_help_is_not_judged() -> None:
    reward = CountdownReward()
    assert reward(["<answer>1</answer>"], ["x"], {"numbers": [[1]]})[0].status == "bad_gold"
    assert reward(["<answer>1</answer>"], ["1"], {"numbers": [None]})[0].status == "bad_gold"
    for columns in ({}, {"numbers": ["7 7 3"]}):
        with pytest.raises(MissingColumn, match="numbers"):
            reward(["<answer>1</answer>"], ["1"], columns)


# --- subset sum ---


def scored_subset(answer: str) -> Score:
    completion = f"<think>9+7=16</think><answer>{answer}</answer>"
    return SubsetSumReward()([completion], ["23"], {"numbers": [[12, 9, 7, 7, 4]]})[0]


@pytest.mark.parametrize(
    "answer",
    [
        "12+7+4", "7 + 12 + 4", "9+7+7", "12, 7, 4", "\\boxed{4+7+12}", "12+7+4=23", "$12 + 7 + 4 = 23$",
        "\\{12, 7, 4\\}",
    ],
)  # fmt: skip
def test_given_numbers_that_add_up_are_right(answer: str) -> None:
    assert scored_subset(answer).value == 1.0


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("12+9", "21 instead of 23"),
        ("9+9+4", "chooses 9 9 4 of 12 9 7 7 4"),  # 9 is there once
        ("23", "chooses 23 of 12 9 7 7 4"), ("12+7+4=24", "says 24 instead of 23"),
        ("12+7=4=23", "more than an equation with the target at its end"),
        ("=23", "no whole numbers with + between them"), ("12*2", "no whole numbers with + between them"),
        ("9-7", "no whole numbers with + between them"), ("12+7+4.0", "no whole numbers with + between them"),
    ],
)  # fmt: skip
def test_any_other_choice_is_wrong(answer: str, detail: str) -> None:
    assert scored_subset(answer) == Score(0.0, "wrong", detail)
