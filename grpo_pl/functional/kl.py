"""Per-token estimators of the KL divergence between the policy and its reference, and their gradients.

With d = log π(token) − log π_ref(token) and tokens drawn from π (Schulman, "Approximating KL divergence", 2020):

==============  ===============  ========================  ====================================================
estimator       value            its expectation           expected gradient when it is a term of the loss
==============  ===============  ========================  ====================================================
k1              d                KL(π‖ref)                 zero, only noise: use it in the reward instead
k2              d² / 2           biased, low variance      that of the per-prefix KL(π‖ref)
k3              e^−d − 1 + d     KL(π‖ref), low variance   that of the per-prefix KL(ref‖π), the other direction
ratio · k3      ratio · k3       KL(π‖ref) per prefix      that of the per-prefix KL(π‖ref), like k2 at ratio 1
==============  ===============  ========================  ====================================================

"Per-prefix" holds the distribution of prefixes fixed and adds up the divergences of the next-token distributions.
k1 summed over a completion and subtracted from its reward gives the gradient of the whole sequence's KL(π‖ref).

Half-precision log-probabilities are converted to float32 before they are subtracted. Every gradient has the sign of its
formula and is finite for finite log-probabilities, however far apart they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_pl.functional.argument_checks import check_choice

Estimator = Literal["k1", "k2", "k3", "k3_weighted"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``: e^20 is far outside any useful range and still finite. The clamp
bounds values and slopes; it never changes the sign of a slope nor makes it 0."""
_SERIES = 0.5
"""Up to this |x|, e^x − 1 − x is summed as a series, because the formula would subtract nearly equal numbers."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d = log π − log π_ref: unbiased, of either sign, high variance. Any shape."""
    return _difference(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d² / 2: never negative, biased as a value (+25 % at KL = 0.5 between unit normals). Any shape."""
    return 0.5 * _difference(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """e^−d − 1 + d: never negative and unbiased (DeepSeekMath, arXiv:2402.03300, eq. 4). Any shape.

    Below d = −MAX_LOG_RATIO it continues as a straight line with the slope at that point.
    """
    minus_d = _difference(ref_logprobs, logprobs)
    return _GivenSlope.apply(minus_d, *_exp_beyond_line(minus_d.detach()))  # type: ignore[no-any-return, no-untyped-call]


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """ratio · k3 (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); unbiased per prefix only. Any shape.

    ``ratio`` = exp(logprobs − old_logprobs) of the token corrects for the older policy that drew the token, given its
    prefix. It does not correct for the prefixes, which are the older policy's as well: over whole completions the value
    is biased unless both policies are the same.

    The gradient includes both factors: ∂(ratio · k3) / ∂logprobs = ratio · d. It is computed in this closed form, and
    the graph of ``ratio`` is not used: the sum of two terms would cancel to noise where d is far below 0.
    """
    d = _difference(logprobs, ref_logprobs.detach())
    d, ratio = torch.broadcast_tensors(d, ratio.detach())
    value, _ = _exp_beyond_line(-d.detach())
    return _GivenSlope.apply(d, ratio * value, ratio * d.detach())  # type: ignore[no-any-return, no-untyped-call]


def estimate(estimator: Estimator, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """The estimator of that name; ``ratio`` is used by ``k3_weighted`` alone. Any shape.

    Raises:
        ValueError: there is no estimator of that name.
    """
    check_choice("estimator", estimator, Estimator)
    if estimator == "k3_weighted":
        return k3_weighted(logprobs, ref_logprobs, ratio)
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](logprobs, ref_logprobs)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps to ± MAX_LOG_RATIO but keeps slope 1, so that a ratio at the bound still gets a gradient. Any shape."""
    clamped = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _GivenSlope.apply(log_ratio, clamped, torch.ones_like(clamped))  # type: ignore[no-any-return, no-untyped-call]


def _difference(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return left.to(wide) - right.to(wide)


def _exp_beyond_line(x: Tensor) -> tuple[Tensor, Tensor]:
    """e^x − 1 − x and its slope e^x − 1, accurate to rounding; continued as a straight line above MAX_LOG_RATIO."""
    slope = torch.expm1(x.clamp(max=MAX_LOG_RATIO))
    line = (x - MAX_LOG_RATIO).clamp(min=0.0)
    small = x.clamp(-_SERIES, _SERIES)
    series = torch.ones_like(x)
    for n in range(14, 2, -1):  # x²/2 · (1 + x/3 · (1 + x/4 · (…))): the first term left out is below 2e-16
        series = 1.0 + series * small / n
    value = torch.where(x.abs() <= _SERIES, 0.5 * small.square() * series, slope - x.clamp(max=MAX_LOG_RATIO))
    return value + line * slope, slope


class _GivenSlope(torch.autograd.Function):
    """A function of ``x`` given by its ``value`` (forward) and its ``slope`` (backward), which the caller computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None
