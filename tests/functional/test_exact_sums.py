"""Sums of rewards against pencil and paper."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_pl.functional.exact_sums import as_written, from_float32, total_reward, weighted_sum


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([0.1, 0.2], [1, 1], 0.3),
        ([1.0, 1.0], [0.1, 0.2], 0.3),
        ([0.1] * 10, [1] * 10, 1.0),
        ([1 / 3] * 3, [1] * 3, 1.0),
        ([1 / 3], [0.3], 0.1),
        ([2 / 7, 5 / 7], [0.7, 0.7], 0.7),
        ([1.1, -1.0], [1, 1], 0.1),
        ([1e16, 1.0, -1e16], [1, 1, 1], 1.0),
        ([1e-7, 2e-7], [1, 1], 3e-7),
        ([], [], 0.0),
    ],
)
def test_a_sum_is_the_one_on_paper_in_any_order(values, weights, expected):
    for order in itertools.islice(itertools.permutations(range(len(values))), 24):
        assert weighted_sum([values[i] for i in order], [weights[i] for i in order]) == expected


def test_a_number_is_read_as_it_was_written():
    assert as_written(0.1) == Fraction(1, 10)
    assert as_written(-2 / 3) == Fraction(-2, 3)
    assert as_written(0.123456789012) == Fraction(123456789012, 10**12)
    assert from_float32(0.10000000149011612) == 0.1


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_reading_loses_nothing(value):
    assert float(as_written(value)) == value
    assert weighted_sum([value], [1.0]) == value


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
def test_a_sum_is_within_rounding_of_the_plain_one(values):
    assert weighted_sum(values, [0.5] * len(values)) == pytest.approx(sum(0.5 * v for v in values), abs=1e-10)


def test_a_reward_without_a_value_or_a_weight_is_left_out_of_the_total():
    assert total_reward([0.1, None, 0.2, 5.0], [1, 7, 1, 0]) == 0.3
    assert total_reward([None, 5.0], [1, 0]) is None
    assert total_reward([0.0, None], [-2, 1]) == 0.0


def test_a_sum_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match="too large"):
        weighted_sum([1e308, 1e308], [1, 1])
