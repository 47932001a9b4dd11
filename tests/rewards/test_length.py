from typing import Literal

import pytest

from grpo_pl.rewards import ExactReward, LengthReward, RepetitionReward
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.length import budget_share, cosine_scale, overlong_punishment, repeated_share


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (192, 0.0), (208, -0.25), (224, -0.5), (256, -1.0), (300, -1.0)]
)
def test_overlong_punishment_is_dapos_ramp(length: int, expected: float) -> None:
    assert overlong_punishment(length, max_length=256, cache_length=64) == expected


def test_cosine_scale_runs_from_start_to_end_and_stays_there() -> None:
    values = [cosine_scale(n, max_length=100, at_start=1.0, at_end=0.5) for n in (0, 50, 100, 250)]
    assert values == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert cosine_scale(25, max_length=100, at_start=1.0, at_end=0.0) == pytest.approx(0.5 + 0.5 * 0.5**0.5)


def test_budget_share_falls_from_the_budget_to_its_double() -> None:
    assert [budget_share(n, budget=10) for n in (0, 10, 15, 20, 99)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_cosine_reward_prefers_short_right_and_long_wrong_answers() -> None:
    reward = LengthReward(shape="cosine", max_length=10, correct=ExactReward())
    scores = reward([r"\boxed{5}"] * 3, ["5", "6", " "], {"completion_length": [10, 0, 5]})
    assert [s.value for s in scores] == [pytest.approx(0.5), -1.0, None]
    assert [s.status for s in scores] == ["ok", "wrong", "bad_gold"]


def test_overlong_reward_uses_the_column() -> None:
    scores = LengthReward(max_length=10, cache_length=4)(["", "", ""], [""] * 3, {"completion_length": [6, 8, 11]})
    assert [(s.value, s.status) for s in scores] == [(0.0, "ok"), (-0.5, "wrong"), (-1.0, "wrong")]


def test_a_row_may_bring_its_own_budget() -> None:
    reward = LengthReward(shape="budget", max_length=10)
    columns = {"completion_length": [15, 15]}
    assert [s.value for s in reward(["", ""], ["", ""], columns)] == [0.5, 0.5]
    assert [s.value for s in reward(["", ""], ["", ""], {**columns, "token_budget": [15, 5]})] == [1.0, 0.0]
    as_in_csv = {"completion_length": [15] * 3, "token_budget": ["", None, "15"]}
    assert [s.value for s in reward([""] * 3, [""] * 3, as_in_csv)] == [0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": "sine"}, "shape"),
        ({"max_length": 0}, "max_length"),
        ({"cache_length": 0}, "cache_length"),
        ({"cache_length": 999}, "cache_length"),
        ({"shape": "cosine"}, "correct"),
        ({"shape": "budget", "correct": ExactReward()}, "correct"),
    ],
)
def test_senseless_lengths_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LengthReward(**options)


def test_repetition_counts_ngrams() -> None:
    assert repeated_share("a b c d", n=2) == 0.0
    assert repeated_share("a b a b a", n=2) == pytest.approx(0.5)  # ab ba ab ba
    assert repeated_share("x", n=2) == 0.0
    assert repeated_share("哈哈哈哈哈", n=2, unit="character") == pytest.approx(0.75)


@pytest.mark.parametrize(
    "text",
    ["42," * 50, "42" * 100, "}" * 200, "ab_" * 60, "哈" * 200, "<b>" * 60, "-7;" * 70, "x" * 64 + " " + "x" * 64],
)
def test_repetition_without_spaces_is_seen(text: str) -> None:
    assert repeated_share(text, n=4) > 0.9


@pytest.mark.parametrize(
    "text",
    ["abababab", "哈哈哈哈", "42|42|42", "aaaaaaaa", "no no no no", "42 42 42", "7;7;7;7;7", "你好你好你好", "!!!!!!!!",
     "<b><b><b>", "ABabABab", "x\nx\nx\nx\nx", "632, 632, 632", "so it is 42|42|42"],
)  # fmt: skip
@pytest.mark.parametrize("unit", ["word", "character"])
def test_short_runs_of_the_same_are_seen(text: str, unit: Literal["word", "character"]) -> None:
    assert repeated_share(text, n=4, unit=unit) > 0.1
    assert RepetitionReward(unit=unit)([text], [""], {})[0].status == "wrong"


def test_what_stands_there_for_the_third_time_counts() -> None:
    assert repeated_share("42|42|42", n=4) == 2 / 8
    assert repeated_share("abababab", n=4) == 4 / 8
    assert repeated_share("哈哈哈哈", n=4) == 2 / 4


@pytest.mark.parametrize(
    "text",
    ["(0,0,0)", "1+1+1=3", "haha", "bananas", "Mississippi", "very very good", "1,000,000,000,000", "10000000000",
     "0.0000000001", "0.333333", "x = y = z = 5", "hmmm... so", "a_1, a_2, a_3, a_4", "谢谢", "慢慢来",
     "2^2^2", r"\frac{1}{1}", "the dog saw the cat, the cat saw the dog"],
)  # fmt: skip
def test_honest_text_is_free_of_short_runs(text: str) -> None:
    assert repeated_share(text, n=4) == 0.0


def test_characters_hardly_count_against_honest_text() -> None:
    honest = (
        "First we add the units: 7 + 5 = 12, so we write 2 and carry 1. Then 4 + 8 + 1 = 13, so we write 3 and keep 1. "
        r"Finally 3 + 2 + 1 = 6, which gives \frac{632}{1} = 632, and 632 - 285 = 347 confirms it."
    )
    assert repeated_share(honest, n=4) < 0.1


def test_a_column_that_is_no_number_of_tokens_or_missing_is_named() -> None:
    with pytest.raises(MissingColumn, match="needs the column 'completion_length'"):
        LengthReward()(["x"], ["x"], {"prompt": ["x"]})
    for bad in ("many", None, float("nan"), -1):
        with pytest.raises(MissingColumn, match="completion_length must be a whole number"):
            LengthReward()(["x"], ["x"], {"completion_length": [bad]})
    with pytest.raises(MissingColumn, match="token_budget must be a whole number >= 1, got 0"):
        LengthReward(shape="budget")(["x"], ["x"], {"completion_length": [1], "token_budget": [0]})


def test_repetition_reward_is_a_penalty() -> None:
    scores = RepetitionReward(ngram=2, max_penalty=0.5)(["A b a B a", "one two three"], ["", ""], {})
    assert [(s.value, s.status) for s in scores] == [(-0.25, "wrong"), (0.0, "ok")]
    with pytest.raises(ValueError, match="ngram"):
        RepetitionReward(ngram=0)
    with pytest.raises(ValueError, match="max_penalty"):
        RepetitionReward(max_penalty=-1.0)
    with pytest.raises(ValueError, match="unit"):
        RepetitionReward(unit="line")  # type: ignore[arg-type]
