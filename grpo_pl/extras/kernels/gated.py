"""SiLU(gate) · up in one Triton kernel, and its gradient in one, for GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_pl.extras.kernels.launch import device_of

_BLOCK = 1024


class SiluProduct(torch.autograd.Function):
    """gate · σ(gate) · up of two tensors of one shape and type, computed in float32; keeps nothing but the two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        assert gate.shape == up.shape and gate.dtype == up.dtype
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        mixed = torch.empty_like(gate)
        with device_of(gate):
            _forward[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, mixed, gate.numel(), BLOCK=_BLOCK, num_warps=4)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        arguments = (gate, up, grad.contiguous(), to_gate, to_up, gate.numel())
        with device_of(gate):
            _backward[(triton.cdiv(gate.numel(), _BLOCK),)](*arguments, BLOCK=_BLOCK, num_warps=4)
        return to_gate, to_up


@triton.jit
def _forward(gate, up, mixed, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(gate + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    out = wide / (1.0 + tl.exp(-wide)) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed + at, out.to(x.dtype), mask=inside)


@triton.jit
def _backward(gate, up, grad, to_gate, to_up, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """d SiLU(x) / dx = σ(x) (1 + x (1 − σ(x)))."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    narrow = tl.load(gate + at, mask=inside, other=0.0)
    x = narrow.to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    sigma = 1.0 / (1.0 + tl.exp(-x))
    tl.store(to_gate + at, (g * y * sigma * (1.0 + x * (1.0 - sigma))).to(narrow.dtype), mask=inside)
    tl.store(to_up + at, (g * x * sigma).to(narrow.dtype), mask=inside)
