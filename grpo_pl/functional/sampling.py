"""Draws tokens as a pure function of logits and a key: inverts the CDF at one counter-based uniform number per token.

There is no generator state to save. The uniform number is a hash of the row's key, which identifies the sample, and of
the token's position, so a sample does not depend on its neighbours in the batch, on padding, or on the world size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from grpo_pl.types import NO_TOKEN, SampleKey

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's increment and multipliers, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK = 64  # tokens per block of the two-level CDF
_FLAT_SEARCH = 1024  # vocabularies below this are searched in one level
_WEIGHT_BITS = 44  # 2**19 weights of up to 1 sum to less than 2**63
_UNIFORM_BITS = 48  # u <= 1 - 2**-48, so u * total is below total in float64


def row_key(*parts: int | str) -> int:
    """Hash of the parts that identify a sample, a signed 64-bit integer; the same on every machine and Python run."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def small_seed(*parts: int | str) -> int:
    """The lowest 32 bits of ``row_key``, 0 … 2³² - 1: the range that NumPy, Gymnasium and others take seeds from."""
    return row_key(*parts) % 2**32


def sample_key(key: SampleKey) -> int:
    """The ``row_key`` of a sample; each turn of an episode has its own, and turn 0 that of a single-turn sample.

    With ``drawn`` tokens before, key + golden · drawn: its `uniforms` at position i are the sample's at drawn + i.
    """
    parts = (key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample)
    first = row_key(*parts, *([key.turn] if key.turn else []))
    return (first + _GOLDEN * key.drawn + 2**63) % 2**64 - 2**63


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """One number in [0, 1) per row: splitmix64(key + golden · (position + 1)), top 48 bits.

    Args:
        keys: (B,) int64, from ``row_key``.
        positions: (B,) int64 or one integer, the index of the completion token being drawn.

    Returns:
        (B,) float64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 13.
    """
    positions = torch.as_tensor(positions, dtype=torch.int64, device=keys.device)
    z = keys + (positions + 1) * _GOLDEN  # int64 tensors wrap around, as the hash requires
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64's ``>>`` copies the sign bit, and the mask removes the copies."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def truncate_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sets to -inf the logits that top-k and then top-p exclude; ``top_k=0`` and ``top_p=1`` exclude nothing.

    The nucleus is the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al. 2020, eq. 2);
    the most likely token is always included. ``logits`` (B, V) must already be divided by the temperature.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        mass_before = running_sums(probabilities, probabilities.dtype) - probabilities
        excluded = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


def kept_tokens(logits: Tensor) -> Tensor:
    """(B, K) int32: the ids of each row's tokens that `truncate_logits` left, ascending, ``NO_TOKEN`` behind them.

    K is the largest number of them in a row of ``logits`` (B, V).
    """
    kept = logits > -torch.inf
    counts = kept.sum(dim=-1, keepdim=True)
    width = int(counts.max())
    first = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return first.masked_fill(torch.arange(width, device=logits.device) >= counts, NO_TOKEN).int()


def likeliest_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, K) int32 ids of each row's K = min(``count``, V) most likely tokens, the first one most, and their
    log-probabilities (B, K) float32; ``NO_TOKEN`` and −inf where truncation left fewer.

    Args:
        logits: (B, V), divided by the temperature and truncated.
    """
    logits = logits.float()
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
    return best.indices.masked_fill(best.values == -torch.inf, NO_TOKEN).int(), logprobs


def draw_tokens(
    logits: Tensor, uniform: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting the CDF at ``uniform``; ``temperature=0`` takes the most likely one.

    Args:
        logits: (B, V), any float dtype; the arithmetic is float32, sums and the CDF float64.
        uniform: (B,) in [0, 1), from ``uniforms``; ignored when greedy.

    Returns:
        tokens (B,) int64, and their log-probabilities (B,) float32 under the distribution that was drawn from:
        log softmax(logits / temperature), renormalised after truncation. Greedy: log softmax(logits).
    """
    logits = logits.float()
    greedy = temperature == 0.0
    if not greedy:
        logits = truncate_logits(logits if temperature == 1.0 else logits / temperature, top_k=top_k, top_p=top_p)
    top = logits.amax(dim=-1, keepdim=True)  # (B, 1)
    weights = (logits - top).exp_()  # (B, V), the largest is 1
    if greedy:
        tokens, total = logits.argmax(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True)
    elif weights.shape[-1] < _FLAT_SEARCH:
        tokens, total = _invert(weights, uniform.unsqueeze(-1))
    else:
        tokens, total = _invert_in_blocks(weights, uniform.unsqueeze(-1))
    logprobs = logits.gather(-1, tokens) - top - total.log().float()
    return tokens.squeeze(-1), logprobs.squeeze(-1)


def running_sums(weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Σ_{j ≤ i} w_j along the last axis, in ``dtype``; the weights are not negative and add up to less than 2**19.

    torch has no deterministic cumsum of floats on a GPU, so where deterministic algorithms are asked for the weights
    are added up there as integers, in multiples of 2**-44, which no order of additions changes.
    """
    if weights.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _integer_running_sums(weights).to(dtype)
    return weights.cumsum(dim=-1, dtype=dtype)


def _integer_running_sums(weights: Tensor) -> Tensor:
    whole = (weights.double() * 2.0**_WEIGHT_BITS).round().long()
    return whole.cumsum(dim=-1).double() * 2.0**-_WEIGHT_BITS


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(first index whose cumulative weight exceeds uniform · total, total): (B, 1) int64 and (B, 1) float64."""
    cdf = running_sums(weights)
    total = cdf[:, -1:]
    return _search(cdf, uniform * total), total


def _invert_in_blocks(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """``_invert`` for large vocabularies: finds the block first, then the token in it, so that the cumulative sum is
    over V / _BLOCK blocks instead of V tokens; ten times faster at V = 32,000 on a CPU."""
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    cdf = running_sums(blocks.sum(dim=-1))  # (B, V / _BLOCK)
    total = cdf[:, -1:]
    threshold = uniform * total
    block = _search(cdf, threshold)  # (B, 1)
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = running_sums(blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, _BLOCK)).squeeze(1))
    # the block's sum and its cumulative sum round differently: stay below the latter, or the search leaves the block
    rest = torch.minimum(threshold - before, inside[:, -1:] * (1.0 - 2.0**-_UNIFORM_BITS))
    return (block * _BLOCK + _search(inside, rest)).clamp(max=weights.shape[-1] - 1), total


def _search(cdf: Tensor, threshold: Tensor) -> Tensor:
    """First index with cdf > threshold. ``right`` skips zero weights, whose CDF equals their left neighbour's. The
    clamp keeps the index of a NaN row in range; its log-probability is NaN."""
    return torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[-1] - 1)
