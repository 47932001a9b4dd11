"""`KeyedDraws` for vLLM's second model runner, which keeps the state of requests in slots of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from grpo_pl.functional.sampling import token_keys
from grpo_pl.rollout.vllm.keyed_draws import DRAW, KEY, TOP, told


class SlotDraws(LogitsProcessor):
    """Rows are reordered at every step and name their slot; the index of the token that is drawn is the position of the
    row's last token, plus one, less the tokens of its prompt. Nothing of a step goes to the host or comes from it."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
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

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        if self._how is None:
            return logits
        slots = ctx.expanded_idx_mapping.long()
        real = slots >= 0  # rows that only fill a graph have none
        slots = slots.clamp(min=0)
        positions = ctx.pos.long() + 1 - self._prompt_lengths.gpu[slots].long()
        drawn = told(logits, token_keys(self._names[slots], positions), *self._how)
        return torch.where((real & self._keyed[slots]).unsqueeze(1), drawn, logits)
