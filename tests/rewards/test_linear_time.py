"""What reads a text takes time in proportion to its length, whatever the text repeats."""

import gc
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from grpo_pl.rewards import FormatReward, LenientAnswerReward, StrictAnswerReward
from grpo_pl.rewards.completion_text import last_boxed, stated_answer
from grpo_pl.rewards.mathematics.boxes import boxed_answer
from grpo_pl.rewards.mathematics.second_opinion import boxed_answers

LENGTHS = (125, 1_000, 8_000, 64_000)
"""Characters; each text is eight times as long as the one before."""
NOTHING_S = 0.002
"""Seconds that are not told apart from none at all."""


TOO_FAST = 32.0
"""Growth that is neither linear (8) nor an accident; a quadratic rule has 64."""


def growth(work: Callable[[str], object], text: Callable[[int], str]) -> float:
    """The factor by which the CPU time of ``work`` grows from one length to the next, the largest of all; longer texts
    are left out where a shorter one took too long. Of three attempts the best counts: others use the machine, too."""

    def seconds(length: int) -> float:
        written = text(length)
        gc.disable()  # a collection walks over all that the tests have loaded
        started = time.process_time()
        work(written)
        took = time.process_time() - started
        gc.enable()
        return max(took, NOTHING_S)

    factors = [1.0]
    for shorter, longer in pairwise(LENGTHS):
        factors.append(seconds(longer) / seconds(shorter))
        for _ in range(2):
            if factors[-1] > TOO_FAST:
                factors[-1] = min(factors[-1], seconds(longer) / seconds(shorter))
        if factors[-1] > TOO_FAST:
            break
    return max(factors)


@pytest.mark.parametrize("opening", ["{", r"\boxed{ ", r"\boxed{x ", "<answer>\\boxed{"])
@pytest.mark.parametrize("closing", ["", " }", "}}"])
def test_nested_boxes_are_read_in_linear_time(opening: str, closing: str) -> None:
    def nested(length: int) -> str:
        depth = length // (len(opening) + len(closing))
        return f"\\boxed{{1}} {opening * depth}5{closing * depth}"

    strict, lenient, form = StrictAnswerReward(), LenientAnswerReward(), FormatReward()
    for read in (
        last_boxed, boxed_answer, boxed_answers, stated_answer,
        lambda text: strict.score(text, "5"), lambda text: lenient.score(text, "5"), lambda text: form.score(text, "5"),
    ):  # fmt: skip
        assert growth(read, nested) < TOO_FAST


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\boxed{ \boxed{5} } }", "5"), (r"\boxed{\boxed{5} }, \boxed{6", None),
        (r"\boxed{ \boxed{5}x }", r" \boxed{5}x "), (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"),
        (r"\boxed{ \boxed{5 }", "5 "), (r"\boxed{1}\boxed{}", ""), (r"\boxed{\{\boxed{5}\}}", r"\{\boxed{5}\}"),
    ],
)  # fmt: skip
def test_of_nested_boxes_the_outermost_with_anything_beside_another_counts(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize("gold", ["x+1", "5"])
@pytest.mark.parametrize(
    "repeated",
    [
        r"\langle1,", r"\langle 1 , ", "⟨1,", r"\abs{1", r"\textbf{", r"\boldsymbol{x", r"{1 \over ", "|", "||a", "]1,",
        r"\color[a", "((", r"\left(", "a_1^", r"\text{ ", ", or ", r"1\,", "1.", "√(", "\u0301\u0316",
    ],
)  # fmt: skip
def test_the_lenient_rule_reads_any_text_in_linear_time(repeated: str, gold: str) -> None:
    def text(length: int) -> str:
        return (repeated * length)[:length]

    judge = LenientAnswerReward()
    assert growth(lambda written: judge.score(written, gold), text) < TOO_FAST


def test_the_lenient_rule_finds_an_answer_wherever_it_stands_in_a_long_text() -> None:
    judge, word = LenientAnswerReward(), "so "
    spellings = (r"\langle 1, \pi \rangle", r"\left( 1,\, \pi \right)")
    for before in (0, 21, *range(450, 520, 9), 1_000, 20_000):
        for written in spellings:
            completion = word * (before // 3) + written + " " + word * 700
            assert judge.score(completion, r"(1,\pi)").value == 1, (before, written)
            assert judge.score(completion, r"(2,\pi)").value == 0
    long = "x+1, " * 300
    assert judge.score(f"{word * 900}{long}{word * 900}", long.replace(" ", "")).value == 1
    assert judge.score(word * 900, long).value == 0
