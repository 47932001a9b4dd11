"""A logits processor of vLLM's that draws each row's token by the row's key and leaves it as the only possible one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from grpo_pl.functional.sampling import draw_tokens, uniforms

KEY = "grpo_pl_key"
DRAW = "grpo_pl_draw"
"""Entries of ``SamplingParams.extra_args``: a row's sampling key, and the keywords of ``draw_tokens``, which are one
object for all rows of a rollout."""


class KeyedDraws(LogitsProcessor):
    """Logits become −inf but for the drawn token's, whose is its log-probability: greedy sampling then takes it, and
    "processed logits" give it back, at any temperature. Rows without a key are left as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, dict[str, Any], list[int]]] = {}  # the last grows as tokens are drawn

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
        keys = torch.tensor([key for key, _, _ in states], device=device)
        positions = torch.tensor([len(drawn) for _, _, drawn in states], device=device)
        index = torch.tensor(rows, device=device)
        tokens, logprobs = draw_tokens(logits[index], uniforms(keys, positions), **states[0][1])
        logits[index] = -torch.inf
        logits[index, tokens] = logprobs.to(logits.dtype)
        return logits


def _keyed(params: Any, prompt: list[int] | None, drawn: list[int]) -> tuple[int, dict[str, Any], list[int]] | None:
    extra = params.extra_args or {}
    return (extra[KEY], extra[DRAW], drawn) if KEY in extra else None
