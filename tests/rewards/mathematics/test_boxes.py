"""Which boxes of a text are its answer."""

import pytest

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.mathematics.boxes import boxed_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", r"1 \text{ and } 2"),
        (r"$\boxed{1}$, $\boxed{2}$ or \(\boxed{3}\).", r"1, 2 \text{ or } 3"),
        (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", r"(2, 2) \text{ and } (6, 2)"),
        (r"\boxed{x<1} or \boxed{x>3}", r"x<1 \text{ or } x>3"), (r"x=\boxed{1}, y=\boxed{2}", "1, 2"),
        (r"\(y_1 = \boxed{x} \) and \( y_2 = \boxed{2x} \)", r"x \text{ and } 2x"),
        (r"\boxed{1} papers and \boxed{2} bins", r"1 \text{ and } 2"), (r"\boxed{4} no: \boxed{5}", "5"),
        (r"\boxed{4}, no, \boxed{5}", "5"), (r"\boxed{5} is wrong and \boxed{6}", "6"),
        (r"\boxed{5}\boxed{6}", "6"), (r"\boxed{5}. \boxed{6}", "6"), (r"\boxed{} and \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{}", ""), (r"\boxed{\boxed{5} and \boxed{6}}", r"\boxed{5} and \boxed{6}"),
        (r"\boxed{7 \boxed{5}}, \boxed{8}", r"7 \boxed{5}, 8"), (r"put it in \boxed{, so \boxed{5}", "5"),
        (r"\boxed 7", "7"), (r"\boxed7 and \boxed{-2}", r"7 \text{ and } -2"), (r"\boxed\pi", r"\pi"),
        (r"\boxed 12.", "12"), (r"\boxed 1,234 apples", "1,234"), (r"<answer>\boxed 7</answer>", "7"),
        (r"**\boxed 7**", "7"), (r"\boxed 28%", "28"), (r"$\boxed x$", "x"), (r"\boxed{7} - not \boxed 12^3", "7"),
        (r"\boxed {\frac{1}{2}}, as asked in a \boxed here", r"\frac{1}{2}"), (r"\boxed{\boxed{5}}", "5"),
        (r"}}{ \boxed{\frac{1}{2}}}}", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ],
)  # fmt: skip
def test_neighbouring_boxes_are_one_answer(text: str, answer: str) -> None:
    boxed = boxed_answer(text)
    assert boxed is not None
    assert boxed.answer == answer


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", r"\boxed", r"\boxed{5", r"\boxed{5} or \boxed{6", r"\boxed 12^3", r"\boxed 5/7", r"\boxed 5 + 7"),
        *(r"\boxed 2x", r"\boxed 2(3)", r"\boxed 2\cdot 3", r"\boxed x+1", r"\boxed\pi/2", r"\boxed 5!", r"\boxed 5-3"),
    ],
)
def test_a_text_without_a_closed_last_box_has_no_answer(text: str) -> None:
    assert boxed_answer(text) is None


def test_the_reward_reads_boxes_of_gold_answers_and_percent_signs_behind_boxes(reward: MathReward) -> None:
    rows = [
        ("1, 2", r"$x=\boxed{2}$ or $x=\boxed{1}$", 1.0), ("2", r"\boxed{1} and \boxed{2}", 0.0),
        (r"so \boxed{1}\boxed{2}", r"\boxed{1, 2}", 1.0), (r"\(\boxed{1}\) and \(\boxed{-2}\).", r"\boxed{-2, 1}", 1.0),
        (r"28\%", r"\boxed{28} percent", 1.0), (r"28\%", r"\boxed{28}", 0.0), ("28", r"\boxed{28}\%", 1.0),
        (r"it is $\boxed{20}$ percent", r"\boxed{20\%}", 1.0), (r"it is $\boxed{20}$ percent", r"\boxed{20}", 1.0),
    ]  # fmt: skip
    scores = reward([text for _, text, _ in rows], [gold for gold, _, _ in rows], {})
    assert [score.value for score in scores] == [value for _, _, value in rows]
