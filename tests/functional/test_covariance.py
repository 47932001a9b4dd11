"""Clip-Cov and KL-Cov: products worked out by hand, which tokens are chosen, and what that has to do with entropy."""

import pytest
import torch

from grpo_pl.functional.covariance import covariances, held_back, select

BOUNDS = {"low": 1.0, "high": 5.0}


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_products_worked_out_by_hand():
    # means -2 and 1: (1)(2), (0)(0), (-2)(-1), (1)(-1)
    found = covariances(row(-1.0, -2.0, -4.0, -1.0), row(3.0, 1.0, 0.0, 0.0))
    assert found.tolist() == [2.0, 0.0, 2.0, -1.0]


def test_their_mean_is_how_fast_entropy_falls_along_the_advantages():
    """All tokens of one distribution of twelfths, each as often as it is drawn: d/dη H(softmax(z + ηA)) at η = 0."""
    counts = torch.tensor([6, 3, 2, 1])
    advantages, logits = row(1.0, -0.5, 0.0, 2.0), (counts.double() / 12).log()
    eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs = (logits + eta * advantages).log_softmax(-1)
    (slope,) = torch.autograd.grad(-(logprobs.exp() * logprobs).sum(), eta)
    drawn = torch.arange(4).repeat_interleave(counts)
    assert slope.item() == pytest.approx(-covariances(logits[drawn], advantages[drawn]).mean().item(), rel=1e-12)


def test_the_highest_products_are_held_back():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, 200, generator=generator)
    chosen = select(logprobs, advantages, kind="kl", share=0.05, **BOUNDS, seed=0)
    lp, a = logprobs.double().tolist(), advantages.double().tolist()
    products = [(x - sum(lp) / 200) * (y - sum(a) / 200) for x, y in zip(lp, a, strict=True)]
    assert sorted(chosen.nonzero().flatten().tolist()) == sorted(sorted(range(200), key=lambda i: -products[i])[:10])


def test_some_of_those_between_the_bounds_are_clipped():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = 2 * torch.randn(2, 500, generator=generator, dtype=torch.float64)
    found = covariances(logprobs, advantages)
    between = (found > 1.0) & (found < 5.0)
    draws = [select(logprobs, advantages, kind="clip", share=0.02, **BOUNDS, seed=seed) for seed in (0, 0, 1)]
    assert all(draw.sum() == 10 and not (draw & ~between).any() for draw in draws)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    often = sum(select(logprobs, advantages, kind="clip", share=0.02, **BOUNDS, seed=seed) for seed in range(400))
    assert (often[between] > 0).all()  # nobody is left out for standing last
    assert torch.equal(select(logprobs, advantages, kind="clip", share=1.0, **BOUNDS, seed=0), between)


@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_one_token_at_least_is_chosen_where_there_is_one(kind):
    logprobs, advantages = row(-1.0, -5.0, -2.0), row(1.0, -1.0, 0.0)
    assert select(logprobs, advantages, kind=kind, share=1e-4, low=0.1, high=5.0, seed=0).sum() == 1
    assert select(logprobs[:0], advantages[:0], kind=kind, share=1.0, **BOUNDS, seed=0).tolist() == []
    assert not select(logprobs, advantages, kind="clip", share=1.0, low=50.0, high=60.0, seed=0).any()


def test_equal_products_are_taken_in_their_order():
    same = torch.ones(50)
    assert select(same, same, kind="kl", share=0.1, **BOUNDS, seed=0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_token_is_held_back_with_one_force_and_not_for_rounding_errors():
    log_ratio = row(0.5, -0.25, 1e-6, 3.0).requires_grad_()
    held = held_back(log_ratio, torch.tensor([True, True, True, False]))
    held.sum().backward()
    assert held.tolist() == [0.5, 0.25, 0.0, 0.0]
    assert log_ratio.grad.tolist() == [1.0, -1.0, 0.0, 0.0]
