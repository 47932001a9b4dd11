"""The three estimators against closed forms (Schulman, "Approximating KL divergence", 2020)."""

import math
from decimal import Decimal, localcontext

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


# --- precision and direction --------------------------------------------------------------------------------

MAGNITUDES = [10.0**e for e in range(-12, 1)] + [0.3, 0.49, 0.51, 2.0, 5.0, 10.0, 15.0, 18.0]


def k3_exactly(d: float) -> float:
    """e^−d − 1 + d to 60 digits."""
    with localcontext() as context:
        context.prec = 60
        return float((-Decimal(d)).exp() - 1 + Decimal(d))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float64, 1e-14)]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_is_never_negative_and_right_to_the_last_digits(dtype, tolerance, sign):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(MAGNITUDES).repeat_interleave(50)
    logprobs = (-sign * scale * (0.9 + 0.2 * torch.rand(len(scale), generator=generator))).to(dtype)
    values = kl.k3(logprobs, torch.zeros_like(logprobs))
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    assert (values >= 0).all()
    expected = torch.tensor([k3_exactly(d) for d in logprobs.tolist()], dtype=torch.float64)
    assert ((values.double() - expected) / expected).abs().max() < tolerance
    weighted = kl.k3_weighted(logprobs, torch.zeros_like(logprobs), torch.full_like(logprobs, 2.0))
    assert torch.equal(weighted, 2.0 * values)


def test_half_precision_is_widened_before_it_is_subtracted():
    logprobs, ref = torch.tensor([-3.0], dtype=torch.bfloat16), torch.tensor([-3.015625], dtype=torch.bfloat16)
    for name, expected in (("k1", 0.015625), ("k2", 0.015625**2 / 2), ("k3", k3_exactly(0.015625))):
        value = kl.estimate(name, logprobs, ref, torch.ones(1))
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(expected, rel=1e-6), name


SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: -math.expm1(min(-d, kl.MAX_LOG_RATIO)),
    "k3_weighted": lambda d: 3.0 * d,  # ratio · d, see its docstring
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SLOPES)
def test_no_estimator_ever_turns_its_slope_round(name, dtype):
    d = torch.tensor([*MAGNITUDES, 19.99, 20.01, 20.1, 25.0, 88.0, 700.0, 1e4])
    for sign in (1.0, -1.0):
        logprobs = (sign * d).to(dtype).requires_grad_()
        ratio = torch.full_like(logprobs, 3.0).detach() * (logprobs - logprobs.detach()).exp()
        values = kl.estimate(name, logprobs, torch.zeros_like(logprobs), ratio)
        values.sum().backward()
        assert torch.isfinite(values).all()
        expected = torch.tensor([SLOPES[name](x) for x in logprobs.tolist()], dtype=torch.float64)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(logprobs.grad.double(), expected, rtol=tolerance, atol=0.0)


def test_k3_rises_with_the_distance_also_beyond_the_clamp():
    d = torch.arange(0.0, 100.0, 0.1, dtype=torch.float64)
    for side in (kl.k3(-d, torch.zeros_like(d)), kl.k3(d, torch.zeros_like(d))):
        assert (side[1:] > side[:-1]).all()


def test_a_token_that_the_reference_excludes_still_has_a_finite_slope():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl.k3(logprobs, torch.tensor([-math.inf])).sum().backward()
    assert logprobs.grad.tolist() == [1.0]


def test_an_estimator_that_does_not_exist_is_refused():
    for name in ("abs", "K3", "", None):
        with pytest.raises(ValueError, match="choose one of k1, k2, k3, k3_weighted"):
            kl.estimate(name, torch.zeros(1), torch.zeros(1), torch.ones(1))


def test_a_clamped_log_ratio_keeps_its_slope():
    log_ratio = torch.tensor([-1e4, -20.5, 0.0, 20.5, 1e4, -math.inf], requires_grad=True)
    clamped = kl.clamp_log_ratio(log_ratio)
    clamped.sum().backward()
    assert clamped.tolist() == [-20.0, -20.0, 0.0, 20.0, 20.0, -20.0]
    assert log_ratio.grad.tolist() == [1.0] * 6
