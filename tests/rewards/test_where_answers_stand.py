"""Rewards of answers read them after the thoughts: never within a thought, closed or not."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from grpo_pl.rewards import (
    CountdownReward,
    ExactReward,
    FormatReward,
    MathReward,
    Reward,
    Score,
    SortingReward,
    SubsetSumReward,
)
from grpo_pl.rewards.completion_text import last_program, stated_answer

JUDGES: dict[str, tuple[Reward, str, str]] = {
    "countdown": (CountdownReward(), "7+5", "12"),
    "subset sum": (SubsetSumReward(), "7, 5", "12"),
    "sorting": (SortingReward(credit="distance"), "5, 7", "7 5"),
    "exact": (ExactReward(), "12", "12"),
}
"""Name -> reward, a right answer, its gold answer; the numbers of the puzzles are 7 and 5."""
RIGHT: dict[str, Callable[[str], str]] = {
    "box": lambda answer: f"\\boxed{{{answer}}}",
    "after thoughts": lambda answer: f"<think>\\boxed{{1}}</think>\\boxed{{{answer}}}",
    "box in a block": lambda answer: f"<think>x</think><answer>\\boxed{{{answer}}}</answer>",
    "before a thought": lambda answer: f"<think>x</think>\\boxed{{{answer}}}<think>\\boxed{{1}}",
    "thoughts that were prefilled": lambda answer: f"x</think> \\boxed{{{answer}}}",
    "the last of several": lambda answer: f"<think>x</think>\\boxed{{1}} \\boxed{{{answer}}}",
}
WRONG: dict[str, Callable[[str], str]] = {
    "in a closed thought": lambda answer: f"<think>\\boxed{{{answer}}}</think>",
    "in a thought that was cut off": lambda answer: f"<think>so \\boxed{{{answer}}}",
    "a block in a closed thought": lambda answer: f"<think><answer>\\boxed{{{answer}}}</answer></think>",
    "a block in a thought that was cut off": lambda answer: f"<think><answer>\\boxed{{{answer}}}</answer>",
    "in the second thought": lambda answer: f"<think>x</think><think>\\boxed{{{answer}}}</think>",
    "in a second thought that was cut off": lambda answer: f"<think>x</think> <think>\\boxed{{{answer}}}",
    "another one after the thoughts": lambda answer: f"<think>\\boxed{{{answer}}}</think>\\boxed{{1}}",
    "an empty one after it": lambda answer: f"\\boxed{{{answer}}}\\boxed{{}}",
    "an empty one behind the thoughts": lambda answer: f"<think>\\boxed{{{answer}}}</think>\\boxed{{\\,}}",
    "one that was cut off after it": lambda answer: f"\\boxed{{{answer}}} no, \\boxed{{1",
    "a block before one that was cut off": lambda answer: f"<answer>{answer}</answer>\\boxed{{{answer}",
    "thoughts that never begin": lambda answer: f"\\boxed{{{answer}}}</think>",
}


def scored(name: str, completion: str) -> Score:
    reward, _, gold = JUDGES[name]
    return reward([completion], [gold], {"numbers": [[7, 5]]})[0]


@pytest.mark.parametrize("place", RIGHT)
@pytest.mark.parametrize("name", JUDGES)
def test_an_answer_after_the_thoughts_is_right(name: str, place: str) -> None:
    assert scored(name, RIGHT[place](JUDGES[name][1])).value == 1.0


@pytest.mark.parametrize("place", WRONG)
@pytest.mark.parametrize("name", JUDGES)
def test_an_answer_elsewhere_is_not(name: str, place: str) -> None:
    assert scored(name, WRONG[place](JUDGES[name][1])).value == 0.0


@pytest.mark.parametrize("place", WRONG)
def test_no_form_is_paid_for_it(place: str) -> None:
    assert FormatReward()([WRONG[place]("5")], [""], {})[0].value == 0.0


@pytest.fixture(params=["box", "auto"])
def math(reward: MathReward, request: pytest.FixtureRequest) -> MathReward:
    return replace(reward, answer_in=request.param)


def test_mathematics_are_read_after_the_thoughts_too(math: MathReward) -> None:
    right = [place("12") for place in RIGHT.values()]
    assert {score.value for score in math(right, ["12"] * len(right), {})} == {1.0}
    closed = [place("12") for place in WRONG.values() if "</think>" in place("")]
    assert {score.value for score in math(closed, ["12"] * len(closed), {})} == {0.0}


def test_boxes_in_thoughts_that_never_end_are_read_by_mathematics_alone(math: MathReward) -> None:
    prefilled = ["<think>so \\boxed{12}", "<think>so \\boxed{13}, no: \\boxed{12}", "\\boxed{12}<think>sure?"]
    assert [score.value for score in math(prefilled, ["12"] * 3, {})] == [1.0] * 3
    assert math(["<think>x</think> <think>so \\boxed{12}"], ["12"], {})[0].value == 0.0
    assert math(["<think>so 12"], ["12"], {})[0].value == 0.0  # only boxes


def test_blocks_without_a_box_are_read_by_the_same_rule() -> None:
    for name in ("countdown", "subset sum", "sorting"):
        right = JUDGES[name][1]
        assert scored(name, f"<think>x</think><answer>{right}</answer>").value == 1.0
        for completion in (f"<think><answer>{right}</answer>", f"<think><answer>{right}</answer></think>"):
            assert scored(name, completion).value == 0.0


@pytest.mark.parametrize(
    ("completion", "stated"),
    [
        (r"<answer>x \boxed{ 4 }</answer>", "4"), ("<think>5</think><answer> 4 </answer>", "4"), (" 4 ", "4"),
        (r"<think>\boxed{3}</think>\boxed{4}", "4"), (r"<think>\boxed{3}</think><answer>4</answer>", "4"),
        (r"<think>so \boxed{3}", "3"),  # some rewards read that; who does not, has no answer to count
    ],
)  # fmt: skip
def test_a_vote_is_the_box_then_the_block_then_everything(completion: str, stated: str) -> None:
    assert stated_answer(completion) == stated


# --- programs ---

F = "```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"{F}python\nprint(1)\n{F}", "print(1)\n"), (f"So:\n\n  {F}py\nx = 1\n  {F}\nDone.", "x = 1\n"),
        (f"{F}\nprint(1)\n{F}", "print(1)\n"), (f"{F}python\na\n{F}\ntext\n{F}python\nb\n{F}", "b\n"),
        (f"{F}python\na\n{F}\nIts output:\n{F}text\n1\n{F}", "a\n"), (f"{F}cpp\nint main;\n{F}", None),
        (f"{F}python\nprint(1)", None),  # cut off: what is left of it might pass by luck
        (f"{F}python\nopen\n{F}python\nclosed\n{F}", "closed\n"), ("print(1)", None),
        (f"<think>{F}python\nidea\n{F}</think>I give up.", None),
        (f"<think>idea</think>{F}python title='a.py'\nprint(2)\n{F}", "print(2)\n"),
        (f"{F}python\ns = 'a {F} b'\n{F}", f"s = 'a {F} b'\n"),
        (f"{F}python\na\n{F}\nIts output:\n{F}\n1\n{F}", "a\n"), (f"{F}\na\n{F}\n{F}\nb\n{F}", "b\n"),
        (f"{F}\nidea\n{F}\n{F}py\na\n{F}\n{F}\n1\n{F}\n{F}\n2\n{F}", "a\n"),
        (f"x</think><answer>{F}python\na\n{F}</answer>", "a\n"), (f"<answer> {F}\na\n{F} </answer>", "a\n"),
        (f"<solution><code>{F}py\na\n{F}</code></solution>", "a\n"),
        (f"<answer>\n{F}python\na\n</answer>{F}</answer>", "a\n"),
    ],
)  # fmt: skip
def test_the_last_closed_block_of_python_is_the_program(completion: str, program: str | None) -> None:
    assert last_program(completion) == program
