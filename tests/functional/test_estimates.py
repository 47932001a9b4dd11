"""Intervals against textbook figures, brute force and how often they hold the truth."""

import math
from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch

from grpo_pl.functional.estimates import (
    average_at_k,
    bootstrap_interval,
    estimate_mean,
    majority_at_k,
    mcnemar_exact,
    paired_difference,
    pass_at_k,
    unpaired_difference,
    wilson_interval,
)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(k: int) -> None:
    problems = list(product([False, True], repeat=4))
    expected = [sum(any(s) for s in combinations(p, k)) / math.comb(4, k) for p in problems]
    assert pass_at_k(torch.tensor(problems), k).tolist() == pytest.approx(expected)


def test_majority_against_counting_every_vote() -> None:
    problems = list(product([-1, 0, 1, 2], repeat=4))
    expected = []
    for problem in problems:
        counts = {answer: problem.count(answer) for answer in problem if answer >= 0}
        leaders = [answer for answer, count in counts.items() if count == max(counts.values())]
        expected.append((0 in leaders) / len(leaders) if leaders else 0.0)
    assert majority_at_k(torch.tensor(problems), 4).tolist() == pytest.approx(expected)


def test_majority_and_average_take_the_first_k() -> None:
    assert majority_at_k(torch.tensor([[1, 1, 0, 0, 0]]), 2).tolist() == [0.0]
    assert average_at_k(torch.tensor([[1, 2, 30]]), 2).tolist() == [1.5]


@pytest.mark.parametrize("function", [pass_at_k, majority_at_k, average_at_k])
def test_k_must_fit_the_samples(function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    samples = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="@3 needs at least 3 samples a problem, got 2"):
        function(samples, 3)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        function(samples, 0)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_of_published_figures(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_refuses_what_is_no_proportion() -> None:
    with pytest.raises(ValueError, match="3 of 2 is no proportion"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match=r"got 1\.0"):
        wilson_interval(1, 2, level=1.0)


def test_bootstrap_against_all_resamples() -> None:
    values = [0.0, 0.25, 1.0]
    means = sorted(sum(rows) / 3 for rows in product(values, repeat=3))  # 27 equally likely resamples
    low, high = bootstrap_interval(torch.tensor(values), level=0.8)
    assert low == pytest.approx(means[math.floor(0.1 * 27)])
    assert high == pytest.approx(means[math.floor(0.9 * 27)])


def test_bootstrap_is_the_same_in_any_order_and_comes_in_chunks() -> None:
    values = torch.rand(3001, generator=torch.Generator().manual_seed(3))
    first = bootstrap_interval(values, resamples=700)
    assert first == bootstrap_interval(values.flip(0), resamples=700)
    error = values.std().item() / math.sqrt(len(values))
    centre = values.mean().item()
    assert first == pytest.approx((centre - 1.96 * error, centre + 1.96 * error), abs=0.3 * error)


def test_mean_of_zeros_and_ones_gets_wilson_and_any_other_the_bootstrap() -> None:
    binary = estimate_mean(torch.tensor([True, False, True, True]))
    assert (binary.method, binary.value, binary.problems) == ("wilson", 0.75, 4)
    assert (binary.low, binary.high) == wilson_interval(3, 4)
    graded = estimate_mean(torch.tensor([0.25, 0.5, 1.0]))
    assert graded.method == "bootstrap"
    assert graded.low < graded.value < graded.high
    with pytest.raises(ValueError, match="no problems"):
        estimate_mean(torch.zeros(0))


@pytest.mark.parametrize("binary", [True, False])
def test_nominal_95_percent_intervals_hold_the_truth_about_that_often(binary: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    held = 0
    for _ in range(120):
        chance = torch.rand(60, 1, generator=generator)  # each problem has a difficulty of its own; truth 0.5
        samples = torch.rand(60, 1 if binary else 4, generator=generator) < chance
        found = estimate_mean(samples.double().mean(dim=1))
        held += found.low <= 0.5 <= found.high
    assert 0.90 <= held / 120 <= 0.99


def test_paired_difference_of_matched_proportions_by_hand() -> None:
    # 3 gained, 1 lost of 10: centre 2/12, variance ((3 + 1 + 1)/12 - (2/12)**2)/12
    values = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 1])
    baseline = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 1])
    found = paired_difference(values, baseline)
    half = 1.959964 * math.sqrt((5 / 12 - (1 / 6) ** 2) / 12)
    assert (found.value, found.method) == (pytest.approx(0.2), "agresti-min")
    assert (found.low, found.high) == pytest.approx((1 / 6 - half, 1 / 6 + half), abs=1e-6)


def test_pairs_without_any_difference_are_not_certain() -> None:
    found = paired_difference(torch.ones(8), torch.ones(8))
    assert found.value == 0.0
    assert found.low == pytest.approx(-found.high)
    assert found.high > 0.1


def test_pairing_takes_out_the_difficulty_of_the_problems() -> None:
    generator = torch.Generator().manual_seed(0)
    difficulty = torch.rand(200, generator=generator)
    better = difficulty + 0.05 + 0.01 * torch.randn(200, generator=generator)
    found = paired_difference(better, difficulty)
    assert 0.04 < found.low < 0.05 < found.high < 0.06
    assert estimate_mean(better).low < estimate_mean(difficulty).high  # unpaired, the two overlap


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        paired_difference(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize(
    ("gained", "lost", "expected"),
    [
        (0, 0, 1.0),
        (10, 0, 2 / 2**10),
        (1, 6, 2 * (1 + 7) / 2**7),
        (2, 18, 2 * (1 + 20 + 190) / 2**20),
        (5, 5, 1.0),  # twice the tail is above 1
        (4, 3, 1.0),
        (6, 12, 2 * (1 + 18 + 153 + 816 + 3060 + 8568 + 18564) / 2**18),
        (2000, 2000, 1.0),  # no overflow
    ],
)
def test_mcnemar_by_hand_in_both_directions(gained: int, lost: int, expected: float) -> None:
    assert mcnemar_exact(gained, lost) == mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-12)


def test_mcnemar_is_the_share_of_all_outcomes_that_are_as_far_apart() -> None:
    for pairs in range(1, 9):
        for gained in range(pairs + 1):
            outcomes = [sum(signs) for signs in product((0, 1), repeat=pairs)]
            far = [abs(2 * each - pairs) >= abs(2 * gained - pairs) for each in outcomes]
            assert mcnemar_exact(gained, pairs - gained) == pytest.approx(sum(far) / len(far))
    with pytest.raises(ValueError, match="at least 0, got -1 and 3"):
        mcnemar_exact(-1, 3)


def test_the_unpaired_interval_forgets_who_belongs_to_whom() -> None:
    """Correlation 0.6: the widths are as √(1 − 0.6) to 1."""
    cells = torch.tensor([[1.0, 1.0]] * 160 + [[1.0, 0.0]] * 40 + [[0.0, 1.0]] * 40 + [[0.0, 0.0]] * 160)
    first, second = cells.T
    apart = unpaired_difference(second, first)
    assert apart == unpaired_difference(second.flip(0), first)
    assert apart.value == 0.0 and apart.method == "bootstrap" and apart.problems == 400
    assert apart.high == pytest.approx(1.96 * math.sqrt(2 * 0.25 / 400), rel=0.05)
    low, high = bootstrap_interval(second - first)
    assert (high - low) / (apart.high - apart.low) == pytest.approx(math.sqrt(0.4), rel=0.05)
    with pytest.raises(ValueError, match="no problems"):
        unpaired_difference(second, first[:0])
