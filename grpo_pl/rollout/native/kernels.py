"""Linear layers and attention for decoding, on the fastest kernel that this machine offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.functional.gemm import has_onednn, multiplies_bfloat16, prefers_onednn

_PACK_FROM = 1 << 16  # weights with fewer elements gain nothing from oneDNN's packed layout …
_PACK_FROM_ON_INTEL = 1 << 20  # … on Intel's processors, which have MKL
_ONEDNN_FROM = 1 << 20  # multiply-adds below which oneDNN's call costs more than it saves


class Linear(Protocol):
    """x ↦ x Wᵀ + b, or what stands for it, without gradients; x (rows, in)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the product to ``residual`` (rows, out), in place."""


class Matrix:
    """x ↦ x Wᵀ + b without gradients, x (rows, in) and W (out, in).

    On a CPU the weight is kept as the fastest kernel reads it. In float32 that is on Intel's processors MKL, from Wᵀ,
    and for large weights oneDNN, from its own layout: on one core of a Xeon with AMX, 96 → 528, 8 rows take 12 µs by
    MKL, 20 from W and 44 by oneDNN; on two, 4864 → 896, 4 rows 2.4 ms by MKL and 0.7 by oneDNN, 64 rows 5.3 and 3.9.
    On those of other makers it is oneDNN, since MKL does not use AVX-512 there; on an AMD Zen 5 core, 256 → 2048, 64
    rows 650 → 280 µs, 4 rows 88 → 36 µs; small products are MKL's. In bfloat16 it is oneDNN: on the Xeon, 256 → 2048,
    64 rows 208 → 165 µs, which are 832 in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, rows: int) -> None:
        self._bias = bias
        self._packed: Tensor | None = None
        self._size = weight.numel()
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            pack = prefers_onednn() or (has_onednn() and self._size >= _PACK_FROM_ON_INTEL)
            always = self._size >= _PACK_FROM
        else:
            pack = always = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_bfloat16()
        if pack:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        elif weight.device.type == "cpu" and weight.dtype == torch.float32:
            weight = weight.t().contiguous().t()
        # (in, out); always packed: no second copy
        self._transposed: Tensor | None = None if pack and always else weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        if self._use_packed(x):
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self._transposed is not None
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += x Wᵀ + b, in place."""
        if self._bias is not None or self._use_packed(x) or residual.dtype != x.dtype:
            residual.add_(self(x))
        else:
            assert self._transposed is not None
            residual.addmm_(x, self._transposed)

    def onto(self, beside: Tensor, x: Tensor) -> Tensor:
        """(beside + x Wᵀ) + b, each sum rounded once, as where policies learn; ``beside`` may be overwritten."""
        if self._use_packed(x):
            beside = torch.ops.mkldnn._linear_pointwise.binary(x, beside, self._packed, None, "add")
        else:
            assert self._transposed is not None
            beside.addmm_(x, self._transposed)
        return beside if self._bias is None else beside.add_(self._bias)

    def _use_packed(self, x: Tensor) -> bool:
        return self._transposed is None or (self._packed is not None and x.shape[0] * self._size >= _ONEDNN_FROM)


class Adapted:
    """x ↦ W x + B A x + b, adapters beside their base. In a type of few bits W + B A would round away a B A below half
    a step of W's numbers, as in the first updates all are, and so would the sum of W x and B A x, were W x rounded
    before: it is rounded once.

    Args:
        down: A, (ranks, in).
        up: B, (out, ranks), with the scale of the adapters.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, *, rows: int) -> None:
        self._base = Matrix(weight, bias, rows=rows)
        self._down, self._up = Matrix(down.to(weight), rows=rows), Matrix(up.to(weight), rows=rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self._base.onto(self._up(self._down(x)), x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))


class Packed:
    """Weights with one input, and the adapters beside them, as `Adapted`; weights in 4 bits stay packed, and each is
    unpacked for a product and no longer.

    Args:
        weights: each gives its numbers (out, in).
        biases: theirs.
        order: permutes the outputs, which lie side by side.
    """

    def __init__(
        self,
        weights: Sequence[Callable[[], Tensor]],
        biases: Sequence[Tensor | None],
        adapters: tuple[Tensor, Tensor] | None,
        order: Tensor | None,
        *,
        dtype: torch.dtype,
        rows: int,
    ) -> None:
        self._weights, self._biases, self._order, self._dtype = weights, biases, order, dtype
        self._low_rank = [Matrix(each.to(dtype), rows=rows) for each in adapters or ()]

    def __call__(self, x: Tensor) -> Tensor:
        beside = None
        for matrix in self._low_rank:
            beside = matrix(x if beside is None else beside)  # (rows, out)
        parts, end = list[Tensor](), 0
        for read, bias in zip(self._weights, self._biases, strict=True):
            weight = read().to(self._dtype)
            begin, end = end, end + len(weight)
            y = torch.mm(x, weight.t()) if beside is None else torch.addmm(beside[:, begin:end], x, weight.t())
            parts.append(y if bias is None else y.add_(bias))
        y = torch.cat(parts, dim=1)
        return y if self._order is None else y[:, self._order]

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *, scale: float) -> Tensor:
    """softmax(scale · q Kᵀ + bias) V for one new token per row, without gradients.

    On a CPU as two batches of small products: torch's fused kernel is made for long queries. Measured with 64 rows, 2
    key heads for 4 query heads of 16, 128 columns, two threads: 192 → 65 µs.

    Args:
        queries: (rows, key heads, group, D); the query heads of a group share their key head.
        keys: (rows, key heads, columns, D), where rows and key heads can be viewed as one dimension.
        values: Likewise.
        bias: (rows, 1, 1, columns), 0 or -inf.

    Returns:
        (rows, key heads · group · D).
    """
    rows, columns = queries.shape[0], keys.shape[2]
    if queries.device.type != "cpu" or queries.dtype != torch.float32:
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
        return mixed.reshape(rows, -1)
    scores = torch.bmm((queries * scale).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))  # (rows · heads, group, C)
    if bias is not None:
        scores.view(rows, -1, columns).add_(bias.view(rows, 1, columns))
    return torch.bmm(scores.softmax(dim=-1), values.flatten(0, 1)).view(rows, -1)
