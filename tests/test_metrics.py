"""pass@k against what it means: the share of subsets of k samples that hold a correct one."""

from itertools import combinations, product

import pytest
import torch

from grpo_pl.metrics import PassAtK


def _pass_at_k(correct: list[bool], k: int) -> float:
    subsets = list(combinations(correct, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(k: int) -> None:
    problems = list(product([False, True], repeat=5))
    metric = PassAtK(k)
    metric.update(torch.tensor(problems))
    expected = sum(_pass_at_k(list(problem), k) for problem in problems) / len(problems)
    assert metric.compute().item() == pytest.approx(expected, abs=1e-7)


def test_figures_by_hand() -> None:
    correct = torch.tensor([[True, False, False, False], [False] * 4, [True] * 4])
    for k, expected in [(1, (0.25 + 0 + 1) / 3), (2, (0.5 + 0 + 1) / 3), (4, 2 / 3)]:
        metric = PassAtK(k)
        metric.update(correct)
        assert metric.compute().item() == pytest.approx(expected)


def test_batches_of_any_size_and_number_of_samples_add_up() -> None:
    metric = PassAtK(2)
    metric.update(torch.tensor([[True, False]]))
    metric.update(torch.tensor([[False, False, True], [False, False, False]]))
    assert metric.compute().item() == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_fillers_do_not_count() -> None:
    metric = PassAtK(1)
    metric.update(torch.tensor([[True, False], [True, True]]), torch.tensor([True, False]))
    assert metric.compute().item() == 0.5


def test_without_problems_it_is_zero_and_reset_forgets() -> None:
    metric = PassAtK(1)
    metric.update(torch.tensor([[True]]))
    metric.reset()
    metric.update(torch.tensor([[True]]), torch.tensor([False]))
    assert metric.compute().item() == 0.0


def test_many_samples_do_not_overflow() -> None:
    metric = PassAtK(500)
    metric.update(torch.tensor([[True] + [False] * 999]))
    assert metric.compute().item() == pytest.approx(0.5)


def test_too_few_samples_and_k_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples a problem, got 2"):
        PassAtK(3).update(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="got 0"):
        PassAtK(0)
