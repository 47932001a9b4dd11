"""Weighted sums of rewards without rounding errors: sums that are equal in decimal arithmetic are equal floats.

In binary floating point 0.1 + 0.2 is not 0.3: completions of equal reward would get advantages that are rounding
errors, and a group of equal rewards would seem to differ. Here each reward and weight is taken for the decimal or
fraction that its author wrote, and their weighted sum is rounded once. Needs no torch, so that rewards may use it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

_LARGEST_DENOMINATOR = 1_000_000
"""Largest denominator of fractions that are recognised; such fractions are far apart compared with floats."""


def weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    """Σ_k weight_k · value_k over the numbers `as_written`, rounded once to float64, so independent of their order.

    Raises:
        ValueError: the sum is too large for a float.
    """
    total = sum((as_written(v) * as_written(w) for v, w in zip(values, weights, strict=True)), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        raise ValueError(f"the weighted sum of the rewards {list(values)} is too large: scale them down.") from None


def total_reward(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """`weighted_sum` over the rewards that have a value; None if no reward of non-zero weight has one."""
    there = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight and value is not None]
    return weighted_sum([value for value, _ in there], [weight for _, weight in there]) if there else None


@lru_cache(maxsize=1 << 16)
def as_written(value: float) -> Fraction:
    """The shortest decimal or small fraction that rounds to ``value``: 0.1 is 1/10, and 0.3333333333333333 is 1/3."""
    small = Fraction(value).limit_denominator(_LARGEST_DENOMINATOR)
    return small if float(small) == value else Fraction(repr(value))


def from_float32(value: float) -> float:
    """The shortest decimal whose rounding to float32 is ``value``: 0.1 for 0.10000000149011612."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((number for number in shorter if struct.unpack("f", struct.pack("f", number))[0] == value), value)
