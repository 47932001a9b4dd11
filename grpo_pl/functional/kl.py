"""Per-token estimators of the divergence between the policy and its reference, and what their gradients descend.

With d = log π(token) − log π_ref(token) and tokens drawn from π (Schulman, "Approximating KL divergence", 2020):

==============  ===============  ========================  ====================================================
estimator       value            its expectation           expected gradient when it is a term of the loss
==============  ===============  ========================  ====================================================
k1              d                KL(π‖ref)                 zero: it is noise, use it in the reward instead
k2              d² / 2           biased, low variance      that of the per-prefix KL(π‖ref)
k3              e^−d − 1 + d     KL(π‖ref), low variance   that of the per-prefix KL(ref‖π), the other direction
ratio · k3      ratio · k3       KL(π‖ref), low variance   that of the per-prefix KL(π‖ref), like k2 at ratio 1
==============  ===============  ========================  ====================================================

"Per-prefix" holds the distribution of prefixes fixed and adds up the divergences of the next-token distributions.
k1 summed over a completion and subtracted from its reward gives the gradient of the whole sequence's KL(π‖ref).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "k3_weighted"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``: e^20 is far outside any useful range and still finite."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d = log π − log π_ref: unbiased, of either sign, high variance. Any shape."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d² / 2: never negative, biased as a value (+25 % at KL = 0.5 between unit normals). Any shape."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """e^−d − 1 + d: never negative and unbiased (DeepSeekMath, arXiv:2402.03300, eq. 4). Any shape."""
    minus_d = ref_logprobs - logprobs
    return torch.exp(minus_d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1.0 - minus_d


def k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """ratio · k3, the gradient flowing through both factors (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Any shape.

    ``ratio`` = exp(logprobs − old_logprobs) also makes the value unbiased when the tokens came from an older policy.
    """
    return ratio * k3(logprobs, ref_logprobs)


def estimate(estimator: Estimator, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """The estimator of that name; ``ratio`` is used by ``k3_weighted`` alone. Any shape."""
    if estimator == "k1":
        return k1(logprobs, ref_logprobs)
    if estimator == "k2":
        return k2(logprobs, ref_logprobs)
    return k3(logprobs, ref_logprobs) if estimator == "k3" else k3_weighted(logprobs, ref_logprobs, ratio)
