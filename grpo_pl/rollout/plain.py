"""The plain engine: ``transformers``' own ``generate``, for any causal LM; other engines are checked against it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from grpo_pl.functional.sampling import Noise, token_keys
from grpo_pl.policy.inputs import model_arguments
from grpo_pl.rollout.decoding import DecodeMonitor, assemble, pad_left, row_keys
from grpo_pl.rollout.engine import RolloutEngine, Watching
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class PlainEngine(RolloutEngine):
    """Decodes with ``model.generate``; only the choice of each token is ours, so that samples follow their keys."""

    supports_sampling_mask = True
    supports_top_logprobs = True
    supports_inputs = True
    max_batch_rows: int = 0
    """Most completions decoded at once; 0 takes all of them."""

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        device = model.device
        ids, mask = (t.to(device) for t in pad_left(request.prompt_ids, request.pad_token_id))  # (P, S)
        owners = torch.arange(len(ids), device=device).repeat_interleave(request.group_size)  # (B,)
        keys = torch.tensor(row_keys(request.keys), device=device)
        monitor = DecodeMonitor(request, **watching)
        drawn = self._draw(model, ids, mask, owners, keys, monitor)
        return assemble(monitor, prompt_ids=ids[owners], prompt_mask=mask[owners], drawn=drawn)

    def _draw(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, owners: Tensor, keys: Tensor, monitor: DecodeMonitor
    ) -> list[tuple[Tensor, Tensor]]:
        """Tokens and log-probabilities, both (rows, T), of one chunk of rows after the other.

        Args:
            ids: (P, S), left-padded prompts.
            mask: Likewise.
            owners: (B,) index of each row's prompt, ascending.
            keys: (B,) sampling keys.
        """
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        config = GenerationConfig(
            max_new_tokens=monitor.sampling.max_completion_length,
            do_sample=False,  # greedy over the scores that the choice leaves: the token it drew
            eos_token_id=sorted(monitor.eos) or None,
            pad_token_id=monitor.request.pad_token_id,
            use_cache=True,
        )
        drawn = []
        for first, mine in self._chunks(owners):
            choice = _KeyedChoice(monitor, keys[first : first + len(mine)], prompt_width=ids.shape[1], first_row=first)
            with _decoding(model):
                further: dict[str, Any] = {}
                if monitor.request.inputs is not None:
                    inputs = [monitor.request.inputs[number] for number in mine.tolist()]
                    further = model_arguments(model, ids[mine], inputs)
                sequences = model.generate(
                    ids[mine],
                    **further,
                    attention_mask=mask[mine].long(),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([choice]),
                    stopping_criteria=StoppingCriteriaList([choice.finished]),
                )
            drawn.append((sequences[:, ids.shape[1] :], torch.stack(choice.logprobs, dim=1)))
        return drawn

    def _chunks(self, owners: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rows that are decoded at once: the first one's number, and the prompt of each."""
        chunk = self.max_batch_rows or len(owners)
        return ((first, owners[first : first + chunk]) for first in range(0, len(owners), chunk))


class _KeyedChoice:
    """A logits processor that draws the next token itself and leaves it as the only possible one."""

    def __init__(self, monitor: DecodeMonitor, keys: Tensor, *, prompt_width: int, first_row: int) -> None:
        self._monitor, self._keys = monitor, keys
        self._prompt_width, self._first_row = prompt_width, first_row
        self._finished = torch.zeros_like(keys, dtype=torch.bool)
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._monitor.check_stop()
        sampling, position = self._monitor.sampling, input_ids.shape[1] - self._prompt_width
        rows = torch.arange(len(scores), device=scores.device) + self._first_row
        tokens, logprobs = self._monitor.draw(scores, Noise(token_keys(self._keys, position)), rows, position)
        self.logprobs.append(logprobs)
        live = (~self._finished).nonzero().flatten()
        last = position + 1 == sampling.max_completion_length
        alive = self._monitor.alive(tokens[live], live + self._first_row, last=last, position=position)
        self._finished[live] = ~torch.tensor(alive, device=live.device)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)

    def finished(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """A stopping criterion of ``generate``: (B,) bool."""
        return self._finished


@contextmanager
def _decoding(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode, no gradients, and none of the model's own generation defaults; all restored afterwards.

    ``no_grad`` rather than ``inference_mode``: tensors made under the latter cannot enter a backward pass.
    """
    from transformers import GenerationConfig

    was_training, own_config = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        with torch.no_grad():
            yield
    finally:
        model.generation_config = own_config
        model.train(was_training)
