"""Matrix products in float32 on CPUs that are not Intel's: with oneDNN, where torch would use MKL.

MKL uses older instructions on processors of other makers; oneDNN uses AVX-512 on all that have it. On one AMD Zen 5
core the forward and both backward products of a linear layer take half the time by oneDNN, on one of an Intel Xeon
with AMX 1.1 to 2.3 times as much, so there they are torch's own. Results differ by rounding only.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_WORTH_IT = 1 << 20  # multiply-adds below which oneDNN's call costs more than it saves
_SMALL_SUM = 1 << 17
"""Numbers of a sum over rows below which MKL is faster, for it spreads rows. By two threads of Zen 4, for 2,430 rows
and 128 by 128 numbers: 185 GFLOP/s, and 110 by oneDNN; with 256 by 1,024 both are equal."""


@cache
def has_onednn() -> bool:
    """True if torch offers the operators through which ``torch.compile`` calls oneDNN on x86 processors."""
    operators = torch.ops.mkldnn
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(operators, "_linear_pointwise")
        and hasattr(operators, "_reorder_linear_weight")
    )


@cache
def multiplies_bfloat16() -> bool:
    """True if oneDNN has products in bfloat16 on this processor."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def prefers_onednn() -> bool:
    """True if oneDNN's products are faster here than MKL's: on x86 processors of every maker but Intel."""
    return has_onednn() and "GenuineIntel" not in _maker()


def _maker() -> str:
    described = Path("/proc/cpuinfo")  # Linux, where platform.processor() is empty
    return described.read_text() if described.is_file() else platform.processor()


def suits_onednn(left: Tensor, elements: int) -> bool:
    """True if oneDNN is faster for the product of ``left`` (…, K) with a matrix of ``elements`` = K · M numbers: on a
    CPU that prefers it, in float32, large enough, and unless ``torch.backends.mkldnn.flags`` switched it off."""
    large = left.numel() // max(1, left.shape[-1]) * elements >= _WORTH_IT
    wanted = left.device.type == "cpu" and left.dtype == torch.float32 and large
    return wanted and bool(torch.backends.mkldnn.enabled) and prefers_onednn()


def product(left: Tensor, right: Tensor) -> Tensor:
    """left (N, K) @ right (K, M), without gradient."""
    if left.dtype == right.dtype and suits_onednn(left, right.numel()):
        return _linear(left, right.t(), None)
    return left @ right


class FastLinear(TorchFunctionMode):
    """Context in which ``F.linear``, and so every ``nn.Linear``, uses oneDNN where it is faster, gradients included."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs and _eligible(*args):
            bias = args[2] if len(args) > 2 else None
            return _Linear.apply(args[0], args[1], bias)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _eligible(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        type(x) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)  # a sharded weight has another type
        and weight.dtype == x.dtype
        and weight.ndim == 2
        and suits_onednn(x, weight.numel())
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = _linear(flat_grad, weight.t(), None).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = gram(flat_grad, flat_x)
        if ctx.needs_input_grad[2]:
            to_bias = flat_grad.sum(dim=0)
        return to_x, to_weight, to_bias


def gram(left: Tensor, right: Tensor) -> Tensor:
    """left (N, M), right (N, K) -> leftᵀ right (M, K), without gradient."""
    elements = right.shape[-1] * left.shape[-1]
    if left.dtype != right.dtype or elements < _SMALL_SUM or not suits_onednn(left, elements):
        return left.t() @ right
    if left.shape[-1] > right.shape[-1]:  # oneDNN prefers the longer side as output features
        return _linear(right.t(), left.t(), None).t()
    return _linear(left.t(), right.t(), None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # oneDNN takes its slow reference code for a view with gaps: 128 x 18724 out of 32000 columns, 32 s and not 0.06 s
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_without_gaps(x), _without_gaps(weight), bias, "none", [], "")
    return out


def _without_gaps(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()
