"""Linear layers and attention for decoding, on the fastest kernel that this machine offers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.functional.gemm import has_onednn, multiplies_bfloat16, prefers_onednn

_PACK_FROM = 1 << 16  # weights with fewer elements gain nothing from oneDNN's packed layout …
_PACK_FROM_ON_INTEL = 1 << 20  # … on Intel's processors, which have MKL
_ONEDNN_FROM = 1 << 20  # multiply-adds below which oneDNN's call costs more than it saves


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

    def _use_packed(self, x: Tensor) -> bool:
        return self._transposed is None or (self._packed is not None and x.shape[0] * self._size >= _ONEDNN_FROM)


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
