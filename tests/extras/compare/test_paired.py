"""Cells, tests and intervals of two policies on the same problems, by hand and by how often they hold the truth."""

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from grpo_pl.extras.compare.paired import Answer, Pair, PairedProblems, joined, paired_bootstrap
from grpo_pl.functional.estimates import paired_difference
from grpo_pl.types import Problem

SIMULATIONS = 1000


def pair(number: int, a: Sequence[bool | None], b: Sequence[bool | None]) -> Pair:
    """A problem with answers of these verdicts."""
    sides = (
        [Answer(text=f"{name}{i}", correct=each, tokens=1, finish_reason="stop") for i, each in enumerate(side)]
        for name, side in (("a", a), ("b", b))
    )
    first, second = sides
    return Pair(problem=Problem(id=number, question=f"q{number}", answer="1"), a=first, b=second)


def test_cells_and_flips_by_hand() -> None:
    verdicts = [(True, True)] * 3 + [(True, False)] * 1 + [(False, True)] * 6 + [(False, False)] * 2
    found = PairedProblems.of([pair(i, [a], [b]) for i, (a, b) in enumerate(verdicts)])
    assert found.cells == {"both": 3, "only_a": 1, "only_b": 6, "neither": 2}
    assert found.p_value == pytest.approx(2 * (1 + 7) / 2**7)
    assert [each.problem.id for each in found.flipped] == [4, 5, 6, 7, 8, 9, 3]  # gained first
    assert found.paired.value == pytest.approx(9 / 12 - 4 / 12)
    assert found.unpaired.value == found.paired.value
    assert found.width_ratio == pytest.approx(
        (found.paired.high - found.paired.low) / (found.unpaired.high - found.unpaired.low)
    )
    told = found.as_json()
    assert told["pass@1"]["a"] == pytest.approx(1 / 3) and told["pass@1"]["b"] == 0.75
    assert told["flipped"][-1]["solved_by"] == "a" and told["flipped"][0]["b"][0]["text"] == "b0"


def test_of_several_answers_more_than_half_solve_and_shares_give_the_difference() -> None:
    tie, most = pair(1, [True, False], [True, True]), pair(2, [True, True, False], [False] * 3)
    assert tie.solved == (False, True) and most.solved == (True, False)
    found = PairedProblems.of([tie, most])
    assert most.shares == (Fraction(2, 3), 0)
    assert found.paired.value == pytest.approx((0.5 - 2 / 3) / 2)
    assert found.differing == 2
    assert PairedProblems.of([tie, pair(3, [False, True], [True, False])]).differing == 1


def test_what_could_not_be_judged_counts_neither_as_right_nor_as_wrong() -> None:
    found = PairedProblems.of([pair(1, [None, True], [False, None]), pair(2, [None, None], [True, True])])
    assert found.unjudged == 1 and found.cells["only_a"] == 1
    assert [values.tolist() for values in found.values] == [[1.0], [0.0]]
    with pytest.raises(ValueError, match="of 1 problems none has a judged answer on both sides"):
        PairedProblems.of([pair(2, [None], [True])])


def test_few_differences_of_zeros_and_ones_are_no_certainty() -> None:
    same = torch.tensor([1.0, 0.0] * 20)
    assert paired_bootstrap(same, same) == paired_difference(same, same)
    assert paired_bootstrap(same, same).high > 0.0
    shares = same / 2  # no zeros and ones: by the bootstrap, whatever differs
    assert paired_bootstrap(shares, shares).method == "bootstrap"
    with pytest.raises(ValueError, match="the same problems twice, got 39 and 40"):
        paired_bootstrap(same, same[1:])


def test_sides_that_never_vary_have_no_ratio() -> None:
    assert PairedProblems.of([pair(i, [True], [True]) for i in range(5)]).width_ratio is None


def test_answers_are_joined_by_set_and_problem() -> None:
    one = Problem(id=7, question="q", answer="1")
    right, wrong = (pair(0, [each], [each]).a for each in (True, False))
    found = joined(
        {"val": [one], "val/more": [one]},
        {("val", 7): right, ("val/more", 7): wrong},
        {("val", 7): right, ("val/more", 7): right},
    )
    assert {name: each.cells["only_b"] for name, each in found.items()} == {"val": 0, "val/more": 1}


def test_a_set_without_judged_answers_is_left_out_beside_others() -> None:
    one = Problem(id=7, question="q", answer="1")
    right, unjudged = (pair(0, [each], [each]).a for each in (True, None))
    answers = {("val", 7): right, ("val/more", 7): unjudged}
    assert joined({"val": [one], "val/more": [one]}, answers, answers).keys() == {"val"}
    with pytest.raises(ValueError, match="judged"):
        joined({"val/more": [one]}, answers, answers)


@pytest.mark.parametrize(
    ("samples", "problems", "shift"),
    [(1, 200, 0.085), (1, 200, 0.0), (4, 60, 0.15)],
    ids=["one answer", "equal policies", "four answers"],
)
def test_the_paired_interval_holds_the_truth_in_95_percent_of_simulations(
    samples: int, problems: int, shift: float
) -> None:
    """Problems of any difficulty; b solves each by ``shift`` more often, and both share the noise of a draw."""
    generator = torch.Generator().manual_seed(7)
    held, narrower = 0, 0
    for _ in range(SIMULATIONS):
        hard = torch.rand(problems, 1, generator=generator, dtype=torch.float64) * (1 - shift)  # (P, 1)
        noise = torch.rand(2, problems, samples, generator=generator, dtype=torch.float64)
        shared = torch.rand(problems, samples, generator=generator) < 0.5
        other = torch.where(shared, noise[0], noise[1])  # half of the draws fall alike
        first, second = ((noise[0] < hard).double().mean(1), (other < hard + shift).double().mean(1))
        found = paired_bootstrap(first, second, resamples=400)
        held += found.low <= shift <= found.high
        narrower += found.high - found.low < 2 * 1.96 * math.sqrt((first.var() + second.var()) / problems)
    assert 0.93 <= held / SIMULATIONS <= 0.97
    assert narrower > 0.99 * SIMULATIONS
