"""The race of `sampling` as a Triton kernel, for GPUs: one read of the logits, and no noise in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_pl.extras.kernels.launch import device_of

_BLOCK = 4096  # entries of the vocabulary in registers at once
_PARTS = 8  # most programs that share a row: a few hundred rows alone do not fill a GPU
_LEAST = tl.constexpr(2.0**-33)  # u of a hash of 0


def race(
    logits: Tensor, keys: Tensor, *, temperature: float, noise: tuple[int, int, int, float]
) -> tuple[Tensor, Tensor]:
    """`sampling.draw_tokens` without truncation: tokens (B,) int64 and log-probabilities (B,) float32.

    Args:
        logits: (B, V), any float dtype up to float32; the arithmetic is float32.
        keys: (B,) int64, from `sampling.token_keys`; ignored at temperature 0.
        noise: `sampling.NOISE`.
    """
    rows, vocabulary = logits.shape
    logits, keys = logits if logits.stride(1) == 1 else logits.contiguous(), keys.contiguous()
    divisor = float(temperature) or 1.0
    parts = min(_PARTS, triton.cdiv(vocabulary, _BLOCK))
    best, highest, total = logits.new_empty(3, rows, parts, dtype=torch.float32)
    token = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    with device_of(logits):
        _race_part[rows, parts](
            logits,
            keys,
            best,
            token,
            highest,
            total,
            logits.stride(0),
            vocabulary,
            divisor,
            *noise,
            GREEDY=temperature == 0.0,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    tokens = token.gather(1, best.argmax(dim=1, keepdim=True))  # (B, 1)
    mass = (highest + total.log()).logsumexp(dim=1)
    return tokens.squeeze(1), logits.gather(1, tokens).squeeze(1).float() / divisor - mass


@triton.jit
def _arrival_times(  # type: ignore[no-untyped-def]
    ids, low, high, SPREAD: tl.constexpr, LOW_1: tl.constexpr, LOW_2: tl.constexpr, UNIT: tl.constexpr
):
    """`sampling.arrival_times` of these ids, from both halves of the row's key."""
    h = (ids * SPREAD) ^ low
    h += h >> 16
    h *= LOW_1
    h += h >> 15
    h += high
    h *= LOW_2
    u = tl.abs(h.to(tl.float32)) * UNIT + _LEAST
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u / 5))))  # 1 - u would round small ones away
    return tl.where(u < 1 / 32, series, -tl.log(1.0 - u))


@triton.jit
def _race_part(  # type: ignore[no-untyped-def]
    logits,
    keys,
    best,
    token,
    highest,
    total,
    stride,
    vocabulary,
    temperature,
    SPREAD: tl.constexpr,
    LOW_1: tl.constexpr,
    LOW_2: tl.constexpr,
    UNIT: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The winner of a part of a row's entries; their largest logit and sum of exponentials, which its mass needs."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(vocabulary, BLOCK), parts) * BLOCK
    end = tl.minimum((part + 1) * share, vocabulary)
    key = tl.load(keys + row)
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    top, mass, won, winner = -1e38, 0.0, -float("inf"), 0  # not -inf, of which the difference with itself is NaN
    for first in range(part * share, end, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + ids, mask=ids < end, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(x, 0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
        score = x
        if not GREEDY:
            score = x - tl.log(_arrival_times(ids, low, high, SPREAD, LOW_1, LOW_2, UNIT))
        score_here, place = tl.max(score, 0, return_indices=True)
        winner = tl.where(score_here > won, first + place, winner)
        won = tl.maximum(won, score_here)
    at = row * parts + part
    tl.store(best + at, won)
    tl.store(token + at, winner)
    tl.store(highest + at, top)
    tl.store(total + at, mass)
