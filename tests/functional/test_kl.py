"""The three estimators against closed forms (Schulman, "Approximating KL divergence", 2020)."""

import math

import numpy as np
import pytest
import torch

from grpo_pl.functional import kl

NAMES = ("k1", "k2", "k3")


def gaussians(shift: float, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log densities of q = N(0, 1), which drew x, and p = N(shift, 1)."""
    return -0.5 * x**2, -0.5 * (x - shift) ** 2


def moments(name: str, shift: float) -> tuple[float, float]:
    """Mean and standard deviation of an estimator under q, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    x, w = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    values = kl.estimate(name, *gaussians(shift, x), torch.ones_like(x))
    mean = (w * values).sum()
    return mean.item(), ((w * values**2).sum() - mean**2).sqrt().item()


@pytest.mark.parametrize(
    ("shift", "true", "biases", "deviations"),
    [(0.1, 0.005, (0, 0.0025, 0), (20, 1.42, 1.42)), (1.0, 0.5, (0, 0.25, 0), (2, 1.73, 1.7))],
)
def test_bias_and_deviation_relative_to_the_divergence(shift, true, biases, deviations):
    for name, bias, deviation in zip(NAMES, biases, deviations, strict=True):
        mean, std = moments(name, shift)
        assert (mean - true) / true == pytest.approx(bias, abs=1e-9), name
        assert std / true == pytest.approx(deviation, abs=0.005), name


@pytest.mark.parametrize("shift", [0.1, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_agrees_within_its_standard_error(name, shift):
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = kl.estimate(name, *gaussians(shift, x), torch.ones_like(x))
    standard_error = values.std().item() / math.sqrt(len(x))
    assert abs(values.mean().item() - moments(name, shift)[0]) < 4 * standard_error


def test_k2_and_k3_are_never_negative_and_zero_at_equality():
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -5.0])
    for name in ("k2", "k3"):
        values = kl.estimate(name, logprobs, ref, torch.ones(3))
        assert values[0] == 0
        assert (values[1:] > 0).all()


def test_hand_computed_values():
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl.k1(logprobs, ref).item() == pytest.approx(math.log(2))
    assert kl.k2(logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl.k3(logprobs, ref).item() == pytest.approx(0.5 - 1 + math.log(2))
    assert kl.k3_weighted(logprobs, ref, torch.tensor([3.0])).item() == pytest.approx(3 * (0.5 - 1 + math.log(2)))


def test_far_apart_distributions_stay_finite():
    logprobs = torch.tensor([-500.0], requires_grad=True)
    value = kl.k3(logprobs, torch.tensor([0.0]))
    value.backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()
