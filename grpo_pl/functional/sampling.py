"""Drawing tokens as a pure function of logits and a key: one counter-based uniform per token, inverted CDF.

There is no generator state to save. A row's key names the sample, the position counts its tokens, and the uniform is
a hash of both; so a sample does not depend on its neighbours in the batch, on padding, or on the world size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's increment and multipliers, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 48  # u <= 1 - 2**-48, so u * total stays below total in float64


def row_key(*parts: int | str) -> int:
    """Hashes what names a sample into a signed 64-bit integer, the same on every machine and Python run."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """One number in [0, 1) per row: splitmix64(key + golden · (position + 1)), top 48 bits.

    Args:
        keys: (B,) int64, from :func:`row_key`.
        positions: (B,) int64 or one integer, the index of the completion token being drawn.

    Returns:
        (B,) float64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 13.
    """
    positions = torch.as_tensor(positions, dtype=torch.int64, device=keys.device)
    z = keys + (positions + 1) * _GOLDEN  # int64 tensors wrap around, as the hash wants
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's ``>>`` copies the sign bit, which is masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def truncate_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sets to -inf what top-k and then top-p exclude; ``top_k=0`` and ``top_p=1`` exclude nothing.

    The nucleus is the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al. 2020, eq. 2);
    the most likely token always stays. Expects logits that are already divided by the temperature, shape (B, V).
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        excluded = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


def draw_tokens(
    logits: Tensor, uniform: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the CDF at ``uniform``; ``temperature=0`` takes the most likely one.

    Args:
        logits: (B, V), any float dtype; the arithmetic is float32, the CDF float64.
        uniform: (B,) in [0, 1), from :func:`uniforms`; ignored when greedy.

    Returns:
        tokens (B,) int64, and their log-probabilities (B,) float32 under the distribution that was drawn from:
        log softmax(logits / temperature), renormalised after truncation. Greedy: log softmax(logits).
    """
    logits = logits.float()
    if temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        logits = truncate_logits(logits / temperature, top_k=top_k, top_p=top_p)
    logprobs = logits.log_softmax(dim=-1)
    if temperature > 0.0:
        cdf = logprobs.double().exp().cumsum(dim=-1)  # (B, V)
        threshold = (uniform * cdf[:, -1]).unsqueeze(-1)
        # right=True passes over tokens of zero probability: their CDF equals their left neighbour's
        tokens = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
