"""The race that draws a token, in whole numbers and double precision of Python: a reference for what draws by it."""

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_pl.types import SampleKey

GOLDEN = 0x9E3779B97F4A7C15


def wrapped(number: int, bits: int = 32) -> int:
    """As a signed integer of so many bits."""
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def draw_key(key: SampleKey, position: int) -> int:
    """Of the sample's token at ``position``: blake2b of its name, and splitmix64 of that."""
    parts = [key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample, *([key.turn] if key.turn else [])]
    name = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    z = (int.from_bytes(name, "little") + GOLDEN * (key.drawn + position + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return wrapped(z ^ z >> 31, 64)


def arrival_time(key: int, token: int) -> float:
    h = wrapped(wrapped(token * 0x9E3779B1) ^ wrapped(key))
    h = wrapped(wrapped(h + (h >> 16)) * 0x7FEB352D)
    h = wrapped(wrapped(h + (h >> 15) + wrapped(key >> 32)) * 0x846CA68B)
    return -math.log1p(-((abs(h) * (1 - 2.0**-23) + 0.25) / 2.0**31))


def winner(logits: Sequence[float], key: int, allowed: Collection[int] | None = None) -> int:
    """The token of the largest score, logit - log E, among those that are allowed."""
    tokens = range(len(logits)) if allowed is None else allowed
    return max(tokens, key=lambda token: logits[token] - math.log(arrival_time(key, token)))


def logits_along(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """(T, V) float64: what each of the tokens was drawn from, without cache, padding or neighbours."""
    with torch.no_grad():
        return model.eval()(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
