"""The Bradley–Terry loss against the formula written out, and its gradient."""

import math

import pytest
import torch

from grpo_pl.extras.preferences.loss import agreements, bradley_terry_loss


def test_the_loss_is_the_negative_log_likelihood_of_the_preferences() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randn(2, 50, dtype=torch.float64, generator=generator) * 5
    expected = [
        -math.log(math.exp(w) / (math.exp(w) + math.exp(other)))
        for w, other in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert (bradley_terry_loss(chosen, rejected) - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-10
    assert bradley_terry_loss(torch.tensor([1.0]), torch.tensor([1.0])).item() == pytest.approx(math.log(2.0))


def test_its_gradient_is_the_probability_of_the_other_choice() -> None:
    chosen = torch.tensor([0.3, -1.2, 4.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([1.0, -3.0, 4.0], dtype=torch.float64, requires_grad=True)
    by_chosen, by_rejected = torch.autograd.grad(bradley_terry_loss(chosen, rejected).sum(), (chosen, rejected))
    wrong = torch.tensor([1.0 / (1.0 + math.exp(gap)) for gap in (-0.7, 1.8, 0.0)], dtype=torch.float64)
    torch.testing.assert_close(by_chosen, -wrong, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_rejected, wrong, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(bradley_terry_loss, (chosen, rejected))


def test_large_gaps_stay_finite() -> None:
    loss = bradley_terry_loss(torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4]))
    assert loss.tolist() == [0.0, 2e4]


def test_ties_agree_half() -> None:
    assert agreements(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])).tolist() == [1.0, 0.5, 0.0]
