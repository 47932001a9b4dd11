import pytest

from grpo_pl.rewards import SortingReward
from grpo_pl.rewards.sorting import (
    distance_points,
    inclusion_points,
    order_points,
    read_numbers,
    simple_inclusion_points,
)


def value(completion: str, credit: str, gold: str = "3 1 2 0") -> float | None:
    return SortingReward(credit=credit)([completion], [gold], {})[0].value  # type: ignore[arg-type]


def test_points_by_hand() -> None:
    assert distance_points([0, 1, 2, 3], [0, 2, 1, 3]) == 2
    assert inclusion_points([0, 1, 1, 3], [1, 0, 0, 3]) == 3
    assert simple_inclusion_points([0, 1, 1, 3], [1, 0, 0, 3]) == 4
    assert order_points([0, 2, 1, 3]) == 2
    assert order_points([5]) == 0


@pytest.mark.parametrize(
    ("completion", "credit", "expected"),
    [
        ("0 1 2 3", "distance", 1.0), ("0 1 2 3", "inclusion_order", 1.0), ("3 1 2 0", "distance", 2 / 4),
        ("3 1 2 0", "inclusion_order", 5 / 7), ("0 0 0 0", "inclusion_order", 4 / 7),
        ("0 0 0 0", "inclusion_order_simple", 4 / 7), ("0 1", "distance", 2 / 4), ("0 1", "inclusion_order", 3 / 7),
        ("0 1 2 3 3 3", "inclusion_order", 5 / 7), ("9 8", "inclusion_order", 0.0), ("0" * 50, "distance", 0.0),
    ],
)  # fmt: skip
def test_value_is_points_over_their_maximum(completion: str, credit: str, expected: float) -> None:
    assert value(completion, credit) == pytest.approx(expected)


def test_the_simple_form_pays_for_duplicates_that_are_not_there() -> None:
    assert value("0 0 1", "inclusion_order_simple", gold="0 1 1") == 1.0
    assert value("0 0 1", "inclusion_order", gold="0 1 1") == pytest.approx(4 / 5)
    assert SortingReward(credit="inclusion_order_simple")(["0 0 1"], ["0 1 1"], {})[0].status == "wrong"


def test_numbers_are_read_leniently() -> None:
    assert read_numbers("[0,1, 2]3", single_digits=True) == [0, 1, 2, 3]
    assert read_numbers("0123", single_digits=True) == [0, 1, 2, 3]
    assert read_numbers("-5, 12;7", single_digits=False) == [-5, 12, 7]
    assert value("0123", "distance") == 1.0
    assert value("<think>3 1 2 0</think><answer>0, 1, 2, 3</answer>", "distance") == 1.0
    assert value("3 1 2 0 so \\boxed{0\\,1\\,2\\,3}", "distance") == 1.0
    assert value("-3 12 40", "distance", gold="40 -3 12") == 1.0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0 is wrong, 1 is wrong", None), ("not 0 1", None), ("0 or 1", None), ("0.1", None), ("-0 1", None),
        ("0/1", None), ("0 < 1 ≤ 2 \\le 3", [0, 1, 2, 3]), ("0 -> 1 → 2 \\to 3", [0, 1, 2, 3]),
        ("\\left\\{0,\\;1\\quad 2\\right\\}.", [0, 1, 2]), ("0, 1 and 2", [0, 1, 2]), ("０，１、２", [0, 1, 2]),
        ("", []),
    ],
)  # fmt: skip
def test_a_list_holds_numbers_and_what_separates_them(text: str, numbers: list[int] | None) -> None:
    assert read_numbers(text, single_digits=True) == numbers


def test_longer_numbers_need_something_between_them() -> None:
    assert read_numbers("12-3", single_digits=False) is None
    assert read_numbers("12 −3", single_digits=False) == [12, -3]


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("\\boxed{0 is wrong, 1 is wrong, 2, 3}", "wrong"), ("The list is 0 1 2 3", "wrong"),
        ("<think>0 1 2 3</think>", "no_answer"), ("<think>0 1 2 3</think><answer></answer>", "no_answer"),
        ("<think>\\boxed{0 1 2 3}</think>so", "no_answer"), ("<think>\\boxed{0 1 2 3}", "no_answer"),
        ("<think><answer>0 1 2 3</answer>", "no_answer"), ("0 1 2 3 \\boxed{}", "no_answer"),
        ("0 1 2 3 \\boxed{0 1", "no_answer"),
    ],
)  # fmt: skip
def test_what_is_no_list_earns_nothing_and_thoughts_are_not_read(completion: str, status: str) -> None:
    for credit in ("distance", "inclusion_order", "inclusion_order_simple"):
        score = SortingReward(credit=credit)([completion], ["3 1 2 0"], {})[0]  # type: ignore[arg-type]
        assert (score.value, score.status) == (0.0, status)


def test_numbers_beyond_what_python_converts_are_too_long() -> None:
    reward = SortingReward()
    huge = "7" * 5000
    assert reward([f"{huge} 12"], ["7 12"], {})[0].status == "too_long"
    assert reward([huge], ["7 1"], {})[0].value == 0.0  # five thousand numbers of one digit
    assert reward(["7"], [huge], {})[0].status == "bad_gold"
    assert reward.gold_faults([huge, "1 2", "1 apple"]) == ["no list of numbers", "", "no list of numbers"]


def test_nothing_to_read() -> None:
    assert SortingReward()(["none"], ["1 2"], {})[0].status == "no_answer"
    assert SortingReward()(["1 2"], ["none"], {})[0].value is None
    with pytest.raises(ValueError, match="credit"):
        SortingReward(credit="all")  # type: ignore[arg-type]
