"""Draws tokens as a pure function of logits and a key: a race between the tokens, with noise that is a hash.

Each entry of the vocabulary gets an exponential arrival time E_v, a hash of the row's key, the position and the token;
the smallest E_v / p_v wins, which token v does with probability p_v. This is Gumbel-max sampling, argmax of
log p_v - log E_v (Maddison, Tarlow and Minka, "A* sampling" (2014), section 2), with noise that needs no generator. So
a sample does not depend on its neighbours in the batch, on padding or on the world size, and rounding of the logits
changes a draw only where the two best scores are as close as that rounding.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_pl.functional import accelerated
from grpo_pl.functional.accelerated import has_triton
from grpo_pl.types import NO_TOKEN, SampleKey

DRAW_RULE = "keyed race"
"""Names how tokens are drawn. Checkpoints note it; those without a note drew by inverting the cumulative distribution.
"""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64's increment and multipliers, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_SPREAD = 0x9E3779B1 - (1 << 32)  # an odd number near 2**32 / golden ratio: neighbouring tokens differ in many bits
_LOW_1 = 0x7FEB352D  # multipliers of the 32-bit hash
_LOW_2 = 0x846CA68B - (1 << 32)
_UNIT = 2.0**-31 * (1.0 - 2.0**-23)  # from the hash's size to u, below 1
NOISE = (_SPREAD, _LOW_1, _LOW_2, _UNIT)
"""What a kernel needs to compute the same arrival times."""
_BLOCK = 1 << 20  # entries of (rows, V) that are raced at once: what fits into a cache
_LARGE = 4096  # vocabularies from here on are searched in two levels, and summed once more
_LIKELIEST = 1024
"""Tokens among which the end of a nucleus is looked for before a large vocabulary is sorted."""
_MASS_ERROR = 1e-4  # of a sum of probabilities in float32, with room to spare
_MOST_ENTRIES = 1 << 19  # of noise that is computed ahead, 2 MiB
_MOST_POSITIONS = 16  # of noise that is computed ahead
_WEIGHT_BITS = 44  # 2**19 weights of up to 1 sum to less than 2**63


def row_key(*parts: int | str) -> int:
    """Hash of the parts that identify a sample, a signed 64-bit integer; the same on every machine and Python run."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def small_seed(*parts: int | str) -> int:
    """The lowest 32 bits of ``row_key``, 0 … 2³² - 1: the range that NumPy, Gymnasium and others take seeds from."""
    return row_key(*parts) % 2**32


def sample_key(key: SampleKey) -> int:
    """The ``row_key`` of a sample; each turn of an episode has its own, and turn 0 that of a single-turn sample.

    With ``drawn`` tokens before, key + golden · drawn: its `token_keys` at position i are the sample's at drawn + i.
    """
    parts = (key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample)
    first = row_key(*parts, *([key.turn] if key.turn else []))
    return (first + _GOLDEN * key.drawn + 2**63) % 2**64 - 2**63


def token_keys(keys: Tensor, positions: Tensor | int) -> Tensor:
    """Hash of each row's key and the position of the token that is drawn: splitmix64(key + golden · (position + 1)).

    Args:
        keys: int64, from ``row_key``.
        positions: int64 of a shape that broadcasts with theirs, or one integer: indices of completion tokens.

    Returns:
        int64, of the common shape.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 13.
    """
    positions = torch.as_tensor(positions, dtype=torch.int64, device=keys.device)
    z = keys + (positions + 1) * _GOLDEN  # int64 tensors wrap around, as the hash requires
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64's ``>>`` copies the sign bit, and the mask removes the copies."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def arrival_times(keys: Tensor, vocabulary: int, scratch: Tensor | None = None) -> Tensor:
    """E_v = -log(1 - u_v), exponential with mean 1, of each entry of the vocabulary; float32, (…, V).

    u_v = (|h_v| + 1/4) / 2³¹ of a signed 32-bit hash h_v of the token id and both halves of the key, so times are told
    apart to 2⁻³¹ of their mean, and small ones, which win, keep the precision of float32.

    Args:
        keys: (…) int64, from `token_keys`.
        scratch: (2, …, V) int32, memory to work in; the times are a view of its second half.

    Source of the hash's multipliers and shifts: Wellons, "Prospecting for hash functions" (2018), "lowbias32"; its
    xor with a logical shift is a sum with an arithmetic one here, which is one operation less in torch.
    """
    low, high = keys.int().unsqueeze(-1), (keys >> 32).int().unsqueeze(-1)  # (…, 1) each; int() keeps the low half
    if scratch is None:
        scratch = torch.empty(2, *keys.shape, vocabulary, dtype=torch.int32, device=keys.device)
    h, shifted = scratch[0], scratch[1]  # (…, V)
    ids = torch.arange(vocabulary, dtype=torch.int32, device=keys.device).mul_(_SPREAD)
    torch.bitwise_xor(ids, low, out=h)
    h += torch.bitwise_right_shift(h, 16, out=shifted)
    h *= _LOW_1
    h += torch.bitwise_right_shift(h, 15, out=shifted)
    h += high
    h *= _LOW_2
    times = shifted.view(torch.float32).copy_(h).abs_()
    torch.add(-(2.0**-33), times, alpha=-_UNIT, out=times)  # -u, above -1
    return times.log1p_().neg_()


@dataclass(frozen=True)
class Noise:
    """The noise of one draw in each of B rows: the keys of the draws, or their arrival times if those are known."""

    keys: Tensor | None = None  # (B,) int64, from `token_keys`
    times: Tensor | None = None  # (B, V) float32, from `arrival_times`

    def __getitem__(self, rows: Tensor | slice) -> Noise:
        return Noise(*(None if given is None else given[rows] for given in (self.keys, self.times)))

    def arrival_times(self, vocabulary: int, scratch: Tensor | None = None) -> Tensor:
        """(B, V) float32, see `arrival_times`."""
        if self.times is not None:
            return self.times
        assert self.keys is not None
        return arrival_times(self.keys, vocabulary, scratch)


class PrecomputedNoise:
    """The noise of rows that draw one position after the other; that of several positions is computed at once where the
    vocabulary is small, because a call of torch takes longer than its work there.

    Args:
        keys: (B,) int64, from ``row_key``.
        positions: how many tokens a row draws at most.
    """

    def __init__(self, keys: Tensor, positions: int) -> None:
        self._keys = token_keys(keys.unsqueeze(1), torch.arange(positions, device=keys.device))  # (B, positions)
        self._times = keys.new_empty(0, 0, 0)  # (positions, rows, V), of ``_first`` and those after it
        self._scratch = keys.new_empty(0, dtype=torch.int32)  # of `arrival_times`: new memory costs more than the work
        self._place = torch.zeros_like(keys)  # where a row stands in ``_times``
        self._first = 0

    def at(self, rows: Tensor, position: int, vocabulary: int) -> Noise:
        """The noise of ``rows`` (R,), the numbers of those that still draw; all were among those of the call before.

        Args:
            position: one more than that of the call before, or 0.
        """
        if position >= self._first + len(self._times):
            ahead = min(_MOST_POSITIONS, _MOST_ENTRIES // (len(rows) * vocabulary), self._keys.shape[1] - position)
            if ahead < 2 or has_triton(rows.device):
                return Noise(keys=self._keys[rows, position])
            shape = (2, ahead, len(rows), vocabulary)
            self._scratch = self._scratch if self._scratch.numel() else self._scratch.new_empty(2 * _MOST_ENTRIES)
            scratch = self._scratch[: math.prod(shape)].view(shape)
            self._times = arrival_times(self._keys[rows, position : position + ahead].T, vocabulary, scratch)
            self._place[rows] = torch.arange(len(rows), device=rows.device)
            self._first = position
        times = self._times[position - self._first]
        return Noise(times=times if len(times) == len(rows) else times[self._place[rows]])


def truncate_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sets to -inf the logits that top-k and then top-p exclude; ``top_k=0`` and ``top_p=1`` exclude nothing.

    The nucleus is the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al. 2020, eq. 2);
    the most likely token is always included. ``logits`` (B, V) must already be divided by the temperature.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        return _nucleus(logits, top_p) if logits.shape[-1] < _LARGE else _nucleus_of_likeliest(logits, top_p)
    return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The logits (B, V), -inf outside of the nucleus."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = running_sums(probabilities, probabilities.dtype) - probabilities
    excluded = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
    return logits.masked_fill(excluded, -torch.inf)


def _nucleus_of_likeliest(logits: Tensor, top_p: float) -> Tensor:
    """`_nucleus`, to the bit, without sorting the rows in which it ends among the likeliest tokens: not between equal
    ones, and not where rounding of the sums could move its end."""
    best = logits.topk(_LIKELIEST, dim=-1).values  # (B, K)
    shares = (best - logits.logsumexp(dim=-1, keepdim=True)).double().exp()
    mass_before = running_sums(shares) - shares
    size = (mass_before < top_p).sum(dim=-1, keepdim=True)  # (B, 1) tokens of the nucleus
    least, next_one = best.gather(-1, (size - 1).clamp(min=0)), best.gather(-1, size.clamp(max=_LIKELIEST - 1))
    near = (mass_before - top_p).abs().amin(dim=-1, keepdim=True)
    certain = (size < _LIKELIEST) & (next_one < least) & (near > _MASS_ERROR)  # not of a row with NaN
    cut = logits.masked_fill(logits < least, -torch.inf)
    doubtful = (~certain).squeeze(-1).nonzero().squeeze(-1)
    if len(doubtful):
        cut[doubtful] = _nucleus(logits[doubtful], top_p)
    return cut


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
    logits: Tensor, noise: Noise, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draws one token per row, argmin_v E_v / p_v with the noise's arrival times E; ``temperature=0`` takes the most
    likely one. What is excluded loses the race, so a truncated draw is the untruncated one wherever that is allowed.

    Args:
        logits: (B, V), any float dtype; the arithmetic is float32.
        noise: of the B rows; ignored when greedy.

    Returns:
        tokens (B,) int64, and their log-probabilities (B,) float32 under the distribution that was drawn from:
        log softmax(logits / temperature), renormalised after truncation. Greedy: log softmax(logits).
    """
    size, vocabulary = logits.shape
    everything = temperature == 0.0 or (top_k == 0 and top_p >= 1.0)
    if everything and noise.keys is not None and has_triton(logits.device) and logits.dtype != torch.float64:
        return accelerated.race(logits, noise.keys, temperature=temperature, noise=NOISE)
    rows = max(1, _BLOCK // vocabulary)
    if size <= rows:
        return _race(logits, noise, None, temperature=temperature, top_k=top_k, top_p=top_p)
    scratch = torch.empty(2, rows, vocabulary, dtype=torch.int32, device=logits.device)
    drawn = []
    for first in range(0, size, rows):
        block, free = slice(first, first + rows), scratch[:, : size - first]
        drawn.append(_race(logits[block], noise[block], free, temperature=temperature, top_k=top_k, top_p=top_p))
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _race(
    logits: Tensor, noise: Noise, scratch: Tensor | None, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """`draw_tokens` of the rows of a block; ``scratch`` is (2, B, V) int32 to work in, where new memory takes time."""
    logits = logits.float()
    greedy = temperature == 0.0
    if not greedy:
        logits = truncate_logits(logits if temperature == 1.0 else logits / temperature, top_k=top_k, top_p=top_p)
    room = None if scratch is None else scratch[0].view(torch.float32)
    if greedy:
        probabilities, scores = torch.softmax(logits, dim=-1, out=room), logits
    else:
        times = noise.arrival_times(logits.shape[-1], scratch)  # leaves the first half of the scratch free
        probabilities = torch.softmax(logits, dim=-1, out=room)
        scores = torch.div(probabilities, times, out=None if scratch is None else times)
    tokens = _argmax(scores)
    chosen = probabilities.gather(-1, tokens)
    if logits.shape[-1] >= _LARGE:  # softmax's own sum is off by 1e-5 at 50,000 tokens
        chosen = chosen / probabilities.sum(dim=-1, keepdim=True)
    return tokens.squeeze(-1), chosen.log().squeeze(-1)


def score_gaps(logits: Tensor, noise: Noise, *, temperature: float) -> Tensor:
    """(B,) by how much the best score of each row's race, log p_v - log E_v, exceeds the second best one, in nats.

    Where two computations of the logits (B, V) draw different tokens, it is as small as their difference.
    """
    best = (logits.double() / temperature - noise.arrival_times(logits.shape[-1]).double().log()).topk(2).values
    return best[:, 0] - best[:, 1]


def _argmax(scores: Tensor) -> Tensor:
    """(B, 1) index of each row's largest score. In a large vocabulary the run of 64 tokens that holds it is found
    first: torch finds a largest value several times as fast as its index."""
    if scores.shape[-1] < _LARGE or scores.shape[-1] % 64:
        return scores.max(dim=-1, keepdim=True).indices  # on a CPU faster than ``argmax``
    runs = scores.view(len(scores), -1, 64)  # (B, V / 64, 64)
    run = runs.amax(dim=-1).argmax(dim=-1, keepdim=True)  # (B, 1)
    within = runs.gather(1, run.unsqueeze(-1).expand(-1, 1, 64)).squeeze(1).argmax(dim=-1, keepdim=True)
    return run * 64 + within


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
