import pytest

from grpo_pl.rewards import FormatReward
from grpo_pl.rewards.format import format_failures

GOOD = "<think>2+2 is 4</think>\n<answer>\\boxed{4}</answer>"


def value(completion: str, **options: bool) -> float | None:
    return FormatReward(**options)([completion], [""], {})[0].value


@pytest.mark.parametrize(
    ("completion", "failure"),
    [
        ("2+2 is 4</think><answer>\\boxed{4}</answer>", "no think"),
        ("<think>2+2 is 4</think> \\boxed{4}", "no answer"),
        ("<think>2+2 is 4</think><answer>\\boxed{4}", "unclosed answer"),
        ("<think>2+2 is 4</think><answer>4</answer>", "no box"),
    ],
)
def test_each_of_the_four_failures_is_named_and_worth_nothing(completion: str, failure: str) -> None:
    assert format_failures(completion) == [failure]
    score = FormatReward()([completion], [""], {})[0]
    assert score.value == 0.0
    assert score.detail == failure


def test_the_demanded_form_is_worth_one() -> None:
    assert value(GOOD) == 1.0
    assert value(GOOD, partial=True) == 1.0


def test_text_outside_the_blocks_or_a_repeated_tag_is_not_strict() -> None:
    assert value("Sure! " + GOOD) == 0.0
    assert value(GOOD + GOOD) == 0.0
    assert value("<answer>\\boxed{4}</answer><think>late</think>") == 0.0


def test_a_box_outside_the_answer_block_does_not_count() -> None:
    assert format_failures("<think>\\boxed{4}</think><answer>4</answer>") == ["no box"]


def test_an_empty_box_does_not_count() -> None:
    assert value("<think>x</think><answer>\\boxed{ }</answer>") == 0.0


def test_a_box_is_only_asked_for_on_demand() -> None:
    assert value("<think>x</think><answer>4</answer>", require_box=False) == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("\\boxed{4}", 0.0),
        ("<think>x", 0.25),
        ("<think>x</think>", 0.5),
        ("<think>x</think><answer>\\boxed{4}", 0.75),
        ("<think>x</think><answer>4</answer>", 0.75),
        ("<think><think></think><answer>\\boxed{4}</answer>", 0.75),
        ("</answer><answer>\\boxed{4}</think><think>", 0.25),
    ],
)
def test_partial_credit_counts_tags_that_occur_once_and_in_order(completion: str, expected: float) -> None:
    assert value(completion, partial=True) == expected
