"""A logits processor of vLLM's that draws each row's token by the row's key and masks all others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from grpo_pl.functional.sampling import Noise, draw_tokens, likeliest_tokens, token_keys, truncate_logits

KEY = "grpo_pl_key"
DRAW = "grpo_pl_draw"
TOP = "grpo_pl_top"
"""Entries of ``SamplingParams.extra_args``: a row's sampling key, the keywords of ``draw_tokens``, which are one object
for all rows of a rollout, and how many of the likeliest tokens are to be told as well."""


class KeyedDraws(LogitsProcessor):
    """Logits become −inf but for the drawn token's, whose is minus its log-probability, 0 or more: greedy sampling then
    takes it, and "processed logits" give it back, at any temperature. Those of the likeliest tokens, where they are
    asked for, become their log-probabilities, 0 or less. Rows without a key are left as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _keyed)

    def apply(self, logits: Tensor) -> Tensor:
        rows = sorted(row for row in self._rows if row < len(logits))
        if not rows:
            return logits
        states = [self._rows[row] for row in rows]
        device = logits.device
        keys = torch.tensor([row.key for row in states], device=device)
        positions = torch.tensor([len(row.drawn) for row in states], device=device)
        index = torch.tensor(rows, device=device)
        logits[index] = told(logits[index], token_keys(keys, positions), states[0].draw, states[0].top)
        return logits


def told(logits: Tensor, keys: Tensor, how: dict[str, Any], top: int) -> Tensor:
    """What `KeyedDraws` leaves of logits (B, V) for draws with these ``keys`` (B,), from `token_keys`."""
    tokens, logprobs = draw_tokens(logits, Noise(keys), **how)
    found = torch.full_like(logits, -torch.inf)
    if top:
        scaled = logits.float() / how["temperature"]
        ids, theirs = likeliest_tokens(truncate_logits(scaled, top_k=how["top_k"], top_p=how["top_p"]), top)
        # the largest, for −inf stands where there is no token
        found.scatter_reduce_(1, ids.long().clamp(min=0), theirs.to(found.dtype), "amax")
    return found.scatter_(1, tokens.unsqueeze(1), -logprobs.to(found.dtype).unsqueeze(1))


class _Row(NamedTuple):
    key: int
    draw: dict[str, Any]
    top: int
    drawn: list[int]
    """Grows as tokens are drawn."""


def _keyed(params: Any, prompt: list[int] | None, drawn: list[int]) -> _Row | None:
    extra = params.extra_args or {}
    return _Row(extra[KEY], extra[DRAW], extra[TOP], drawn) if KEY in extra else None
