"""The LM head of `logprobs` with Triton kernels, for GPUs: one pass over a chunk's logits, and one for its gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_pl.extras.kernels.launch import CHUNK_ELEMENTS, CHUNK_TOKENS, device_of

_BLOCK = 4096  # entries of the vocabulary in registers at once
_WARPS = 8


class FusedHead(torch.autograd.Function):
    """Log-probabilities (N,), entropies (N,) and ``top_logprobs`` (N, K) of `logprobs.head_scores`.

    Nothing is kept for the backward pass but the normalisers log Σ_v exp(z_v / τ), (N,); there the logits are computed
    again, and their gradient overwrites them in the type of the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        top_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        logprobs, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        top = logprobs.new_empty(0 if top_ids is None else top_ids.shape)
        token_ids = token_ids.contiguous()
        with torch.autocast(device, enabled=False), device_of(hidden):
            narrow = weight.to(ctx.dtype)
            for rows in _chunks(len(hidden), len(weight)):
                logits = _logits(hidden[rows].to(ctx.dtype), narrow, bias)
                arguments = (token_ids[rows], logprobs[rows], entropy[rows], normaliser[rows])
                _score[(len(logits),)](
                    logits, *arguments, logits.shape[1], float(temperature), BLOCK=_BLOCK, num_warps=_WARPS
                )
                if top_ids is not None:
                    ids = top_ids[rows].long()
                    scaled = logits.gather(-1, ids.clamp(min=0)).float() / temperature
                    top[rows] = (scaled - normaliser[rows].unsqueeze(-1)).masked_fill(ids < 0, -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, token_ids, entropy, normaliser)
        ctx.mark_non_differentiable(top)
        return logprobs, entropy, top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, entropy, normaliser = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grads = [g if g is None else g.float() / ctx.temperature for g in (grad_logprobs, grad_entropy)]
        to_logprobs, to_entropy = (torch.zeros_like(entropy) if g is None else g for g in grads)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            narrow = weight.to(ctx.dtype)
            for rows in _chunks(len(hidden), len(weight)):
                inputs = hidden[rows].to(ctx.dtype)
                slope = _logits(inputs, narrow, bias)
                arguments = (token_ids[rows], entropy[rows], normaliser[rows], to_logprobs[rows], to_entropy[rows])
                _slope[len(slope), triton.cdiv(slope.shape[1], _BLOCK)](
                    slope, *arguments, slope.shape[1], float(ctx.temperature), BLOCK=_BLOCK, num_warps=_WARPS
                )
                if to_bias is not None:
                    to_bias += slope.sum(dim=0, dtype=torch.float32)
                if to_hidden is not None:
                    to_hidden[rows] = (slope @ narrow).to(hidden.dtype)
                if to_weight is not None:
                    to_weight += slope.t() @ inputs
                del slope
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None or bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Runs of tokens whose logits are in memory at a time."""
    size = max(1, min(CHUNK_TOKENS, CHUNK_ELEMENTS // vocabulary))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(C, V) logits in the type of the products, contiguous."""
    logits = inputs @ weight.t()
    return logits if bias is None else logits.add_(bias.to(logits.dtype))


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    logits, token_ids, logprobs, entropy, normaliser, vocabulary, temperature, BLOCK: tl.constexpr
):
    """A row's log p of its token, −Σ_v p_v log p_v and log Σ_v exp z_v, by sums relative to the largest z so far."""
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * vocabulary
    top, mass, distance = -1e38, 0.0, 0.0  # not -inf, of which the difference with itself is NaN
    for first in range(0, vocabulary, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        z = tl.load(mine + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(z, 0))
        weights = tl.exp(z - higher)
        shrink = tl.exp(top - higher)
        distances = tl.where(weights > 0.0, weights * (z - higher), 0.0)  # of −inf 0 times is NaN
        distance = (distance + (top - higher) * mass) * shrink + tl.sum(distances, 0)
        mass = mass * shrink + tl.sum(weights, 0)
        top = higher
    tl.store(normaliser + row, top + tl.log(mass))
    chosen = tl.load(mine + tl.load(token_ids + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - top - tl.log(mass))
    tl.store(entropy + row, tl.log(mass) - distance / mass)


@triton.jit
def _slope(  # type: ignore[no-untyped-def]
    logits, token_ids, entropy, normaliser, to_logprobs, to_entropy, vocabulary, temperature, BLOCK: tl.constexpr
):
    """Overwrites z_v by ([v = k] − p_v) · ∂/∂log p_k − p_v (log p_v + H) · ∂/∂H, both divided by the temperature."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    at = logits + row * vocabulary + ids
    z = tl.load(at, mask=inside, other=-float("inf"))
    logprob = z.to(tl.float32) / temperature - tl.load(normaliser + row)
    p = tl.exp(logprob)
    surprise = tl.where(p > 0.0, p * (logprob + tl.load(entropy + row)), 0.0)
    chosen = tl.where(ids == tl.load(token_ids + row), 1.0, 0.0)
    slope = (chosen - p) * tl.load(to_logprobs + row) - surprise * tl.load(to_entropy + row)
    tl.store(at, slope.to(z.dtype), mask=inside)
