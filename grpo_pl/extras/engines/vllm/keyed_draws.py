"""Logits processors of vLLM's, one for each of its model runners, that draw each row's token by the row's key."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample import logits_processor as second

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
        mine = logits[index]
        tell(mine, torch.ones_like(index, dtype=torch.bool), token_keys(keys, positions), states[0].draw, states[0].top)
        logits[index] = mine
        return logits


def tell(logits: Tensor, mine: Tensor, keys: Tensor, how: dict[str, Any], top: int) -> None:
    """Turns logits (B, V), in place, into what `KeyedDraws` leaves of them.

    Args:
        mine: (B,) bool; other rows stay as they are.
        keys: (B,) from `token_keys`.
        how: keywords of ``draw_tokens``.
        top: how many of the likeliest tokens are told.
    """
    tokens, logprobs = (each.unsqueeze(1) for each in draw_tokens(logits, Noise(keys), **how))
    mine = mine.unsqueeze(1)
    drawn = torch.where(mine, -logprobs.to(logits.dtype), logits.gather(1, tokens))
    if top:
        scaled = logits.float() / how["temperature"]
        ids, theirs = likeliest_tokens(truncate_logits(scaled, top_k=how["top_k"], top_p=how["top_p"]), top)
    logits.masked_fill_(mine, -torch.inf)
    if top:  # the largest, for −inf stands where there is no token
        theirs = theirs.to(logits.dtype).masked_fill(~mine, -torch.inf)
        logits.scatter_reduce_(1, ids.long().clamp(min=0), theirs, "amax")
    logits.scatter_(1, tokens, drawn)


class _Row(NamedTuple):
    key: int
    draw: dict[str, Any]
    top: int
    drawn: list[int]
    """Grows as tokens are drawn."""


def _keyed(params: Any, prompt: list[int] | None, drawn: list[int]) -> _Row | None:
    extra = params.extra_args or {}
    return _Row(extra[KEY], extra[DRAW], extra[TOP], drawn) if KEY in extra else None


class SlotDraws(second.LogitsProcessor):
    """The same for vLLM's second model runner, which keeps the state of requests in slots of the device. Rows are
    reordered at every step and name their slot; the index of the token that is drawn is the position of the
    row's last token, plus one, less the tokens of its prompt. Nothing of a step goes to the host or comes from it."""

    def __init__(self, vllm_config: Any, req_states: second.LogitsProcRequestState) -> None:
        self._prompt_lengths = req_states.prompt_len
        self._names = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=req_states.device)
        self._keyed = torch.zeros(req_states.max_num_reqs, dtype=torch.bool, device=req_states.device)
        self._staged: dict[int, int | None] = {}  # slot -> key of the request that has entered it
        self._how: tuple[dict[str, Any], int] | None = None  # of all rows of a rollout

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        extra = sampling_params.extra_args or {}
        self._staged[req_idx] = extra.get(KEY)
        if KEY in extra:
            self._how = extra[DRAW], extra[TOP]
        return KEY in extra

    def apply_staged_writes(self) -> None:
        if not self._staged:
            return
        device, keys = self._names.device, self._staged.values()
        slots = torch.tensor(list(self._staged), device=device)
        self._names[slots] = torch.tensor([key or 0 for key in keys], device=device)
        self._keyed[slots] = torch.tensor([key is not None for key in keys], device=device)
        self._staged.clear()

    def apply(self, logits: Tensor, ctx: second.LogitsContext) -> Tensor:
        if self._how is None:
            return logits
        slots = ctx.expanded_idx_mapping.long()
        real = slots >= 0  # rows that only fill a graph have none
        slots = slots.clamp(min=0)
        positions = ctx.pos.long() + 1 - self._prompt_lengths.gpu[slots].long()
        tell(logits, real & self._keyed[slots], token_keys(self._names[slots], positions), *self._how)
        return logits
