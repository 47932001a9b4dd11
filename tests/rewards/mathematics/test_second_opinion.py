"""The strict and the lenient judge: what each accepts, and what only one of them does."""

from typing import Any

import pytest

from grpo_pl.rewards import LenientAnswerReward, Score, StrictAnswerReward
from grpo_pl.rewards.mathematics.second_opinion import boxed_answers

STRICT, LENIENT = StrictAnswerReward(), LenientAnswerReward()


def verdicts(completion: str, gold: str) -> tuple[float | None, float | None]:
    return STRICT([completion], [gold], {})[0].value, LENIENT([completion], [gold], {})[0].value


BOTH = [
    (r"<think>347+285</think><answer>\boxed{632}</answer>", "632"), (r"\boxed{5.0}", "5"), (r"\boxed{1,000}", "1000"),
    (r"so \boxed{ \dfrac{1}{2} }", r"\frac12"), (r"\boxed{x + 1}", "x+1"), (r"\boxed{\frac{2}{4}}", r"\frac12"),
    (r"<think>\boxed{4} is wrong</think> \boxed{5}", "5"), (r"${\boxed{5}}$, in \{5\}", "5"),
    (r"so <answer> \boxed{5}" "\n</answer>", "5"),
]  # fmt: skip
LENIENT_ALONE = [
    # right, but not to the letter
    (r"\boxed{0.5}", r"\frac12"), (r"\boxed{84/7} = 12", "12"), (r"\boxed{1+x}, that is x+1", "x+1"),
    ("the answer is 632.", "632"), ("1,2,5", "5"), ("10 - 5", "-5"), ("10−5", "5"), (r"\boxed{3.14159}", "3.1416"),
    *((completion, "5") for completion in (
        # guesses
        r"\boxed{4}\boxed{5}", r"\boxed{5}</think> \boxed{6}", r"\boxed{5} or \boxed{6", r"\boxed{\boxed{5}}",
        # a thought that never ends
        r"<think>so \boxed{5}", r"<think>a</think>b<think>so \boxed{5}", r"<think>a</think>\boxed{5}<think>sure?",
        # tags nested, repeated, missing or out of order
        r"<think><think>a</think>\boxed{5}", r"<think><think>a</think></think>\boxed{5}",
        r"<think>a</think></think>\boxed{5}", r"<think>a</think><think>b</think>\boxed{5}", r"a</think>\boxed{5}",
        r"<think>a</think><answer><answer>\boxed{5}</answer>", r"<think>a</think><answer>\boxed{5}</answer></answer>",
        r"<think>a</think><answer>\boxed{5}</answer><answer></answer>", r"<think>a</think>\boxed{5}</answer>",
        r"<think>a<answer>b</think><answer>\boxed{5}</answer>", r"<think>a<answer>4</answer></think>\boxed{5}",
        r"<answer>\boxed{5}</answer><think>a</think>\boxed{5}",
        # braces too many or too few
        r"<answer>\boxed{5}}}</answer>", r"so \boxed{5}}} it is", r"{ so \boxed{5}",
        # what else stands in the answer block
        r"<answer>It is \boxed{5}.</answer>", r"<answer>\boxed{5}", r"<answer>5</answer> \boxed{5}",
        r"<answer>\boxed{5}</answer><answer>\boxed{5}</answer>", r"<answer>\boxed{5}</answer> \boxed{6}",
    )),
]  # fmt: skip
NEITHER = [(r"\boxed{6=6}", "632"), (r"\boxed{6321}", "632"), (r"\boxed{1+x}", "x+1"), ("", "5")]
"""Texts that do not mention their gold answer."""


@pytest.mark.parametrize(
    ("pairs", "expected"), [(BOTH, (1, 1)), (LENIENT_ALONE, (0, 1)), (NEITHER, (0, 0))], ids=["both", "lenient", "none"]
)
def test_each_pair_is_judged_from_both_sides(pairs: list[tuple[str, str]], expected: tuple[float, float]) -> None:
    assert [pair for pair in pairs if verdicts(*pair) != expected] == []


@pytest.mark.parametrize(
    ("place", "completion", "gold", "value"),
    [
        ("last_number", "There are 5 * 8 = 40.", "40", 1),
        ("last_number", "5 * 8 = 40. The answer is 40 apples", "40", 1),
        ("last_number", "<think>5 * 8 = 41</think> 40", "40", 1), ("last_number", "It is 40.0", "40", 1),
        ("last_number", "It costs -$40", "-40", 1), ("last_number", "39, -$40", "-40", 0),
        ("last_number", r"so \boxed{40}", "40", 1),
        ("last_number", "40, 41 or 42", "42", 0),  # guesses in a row
        ("last_number", "40 41 42", "42", 0), ("last_number", "40; 41/42", "42", 0),
        ("last_number", "42, not 41", "42", 0), ("last_number", "<think>so 42", "42", 0),
        ("last_number", "a</think></think> 42", "42", 0),
        ("last_number", "It is 1/2", "0.5", 0),  # no algebra
        ("last_number", "none", "42", 0), ("auto", r"40, 41, \boxed{42}", "42", 1),
        ("auto", r"\boxed{41}\boxed{42}", "42", 0), ("auto", "<answer>42</answer>", "42", 1),
        ("auto", "<answer>41, 42</answer>", "42", 0),
    ],
)  # fmt: skip
def test_answers_in_another_place_are_read_there(place: Any, completion: str, gold: str, value: float) -> None:
    assert StrictAnswerReward(answer_in=place)([completion], [gold], {})[0].value == value


def test_a_pattern_and_a_field_are_read_as_the_reward_reads_them() -> None:
    behind = StrictAnswerReward(answer_in="pattern", answer_pattern="#### (.+)")
    assert [score.value for score in behind(["3, 4 #### 5", "#### 5 apples"], ["5", "5"], {})] == [1.0, 0.0]
    field = StrictAnswerReward(answer_in="json", answer_field="total")
    assert [score.value for score in field(['{"total": 5}', '{"total": "5 "}', "5"], ["5"] * 3, {})] == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="answer_in is 'box' and answer_pattern is 'x'"):
        StrictAnswerReward(answer_pattern="x")


def test_text_beside_the_box_in_the_answer_block_may_be_allowed() -> None:
    lax = StrictAnswerReward(allow_text=True)
    texts = [r"<answer>It is \boxed{5}.</answer>", r"<answer>\boxed{5}", r"<answer>\boxed{4} or \boxed{5}</answer>"]
    assert [score.value for score in lax(texts, ["5"] * 3, {})] == [1.0, 0.0, 0.0]


def test_numbers_beyond_what_python_converts_are_compared_by_their_digits() -> None:
    huge = "7" * 5000
    assert verdicts(rf"\boxed{{{huge}}}", huge) == (1, 1)
    assert verdicts(rf"\boxed{{{huge}}} \boxed{{5}}", "5") == (0, 1)
    assert verdicts(rf"\boxed{{{huge}}}", huge[1:]) == (0, 1)


def test_an_empty_gold_answer_is_nobodys_fault() -> None:
    for judge in (STRICT, LENIENT):
        assert judge([r"\boxed{5}"], [" "], {}) == [Score(None, "bad_gold", "empty")]
        assert judge.gold_faults(["5", ""]) == ["", "empty"]


def test_boxes_are_all_found_and_an_unclosed_last_one_is_no_answer() -> None:
    assert boxed_answers(r"\boxed{a} \boxed {\frac{1}{2}} \boxed{ }") == ["a", r"\frac{1}{2}", ""]
    assert boxed_answers(r"\boxed{a} \boxed{b") == []
    assert boxed_answers("none") == []
    assert STRICT([r"\boxed{5}\boxed{}"], ["5"], {})[0].status == "no_answer"


@pytest.mark.parametrize(
    "text", ["7" * 10**5, "1 " * 50_000, r"\boxed{" * 20_000, "-" * 10**5, "1," * 10**5, "\\frac{1}" * 20_000]
)
def test_hostile_texts_cost_little(text: str) -> None:
    assert verdicts(text, "632") == (0, 0)
    assert verdicts(f"{text} \\boxed{{{text}}}", "x+632")[1] == 0
