"""The plain engine: ``transformers``' own ``generate``, for any causal LM; other engines are checked against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.functional.sampling import draw_tokens, uniforms
from grpo_pl.policy.stop_strings import StopStrings
from grpo_pl.rollout.engine import (
    PolicyDiverged,
    ProgressFn,
    RolloutEngine,
    RolloutInterrupted,
    StopWatch,
    check_request,
    completion_mask,
    finish_reasons,
    pad_left,
    row_keys,
)
from grpo_pl.types import Rollout, SampleKey, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class PlainEngine(RolloutEngine):
    """Decodes with ``model.generate``; only the choice of each token is ours, so that samples follow their keys."""

    max_batch_rows: int = 0
    """Most completions decoded at once; 0 takes all of them."""

    def generate(
        self,
        model: PreTrainedModel,
        *,
        prompt_ids: Sequence[Sequence[int]],
        keys: Sequence[Sequence[SampleKey]],
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
        stops: StopStrings | None = None,
    ) -> Rollout:
        group_size = check_request(prompt_ids, keys)
        rows = [ids for ids in prompt_ids for _ in range(group_size)]
        ids, mask = pad_left(rows, pad_token_id)  # (B, S)
        ids, mask = ids.to(model.device), mask.to(model.device)
        row_key = torch.tensor(row_keys(keys), dtype=torch.int64, device=model.device)  # (B,)
        chunk = self.max_batch_rows or len(rows)
        ends = StopWatch(stops, len(rows))
        chooser = _KeyedChoice(sampling, set(eos_token_ids), progress, should_stop, ends)
        drawn = [
            self._decode(
                model, ids[i : i + chunk], mask[i : i + chunk], row_key[i : i + chunk], i, chooser, pad_token_id
            )
            for i in range(0, len(rows), chunk)
        ]
        return assemble(
            group_size=group_size,
            prompt_ids=ids,
            prompt_mask=mask,
            drawn=drawn,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            stop_lengths=ends.lengths,
        )

    @staticmethod
    def _decode(
        model: PreTrainedModel,
        ids: Tensor,
        mask: Tensor,
        keys: Tensor,
        first_row: int,
        chooser: _KeyedChoice,
        pad_token_id: int,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (B, T) of one chunk of rows; what follows an EOS is arbitrary."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        chooser.start(prompt_width=ids.shape[1], keys=keys, first_row=first_row)
        config = GenerationConfig(
            max_new_tokens=chooser.sampling.max_completion_length,
            do_sample=False,  # greedy over the scores that the chooser leaves: the token it drew
            eos_token_id=sorted(chooser.eos) or None,
            pad_token_id=pad_token_id,
            use_cache=True,
        )
        with _decoding(model):
            sequences = model.generate(
                ids,
                attention_mask=mask.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([chooser.finished]),
            )
        return sequences[:, ids.shape[1] :], torch.stack(chooser.logprobs, dim=1)


def assemble(
    *,
    group_size: int,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    drawn: Sequence[tuple[Tensor, Tensor]],
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    stop_lengths: Sequence[int] = (),
) -> Rollout:
    """One rollout from chunks of consecutive rows: (tokens, log-probabilities), both (rows, T) with T per chunk.

    What follows a row's first EOS is arbitrary and is masked here.

    Args:
        stop_lengths: tokens of each row up to a stop string, 0 where it has none; empty where there are none at all.

    Raises:
        PolicyDiverged: a log-probability is NaN or infinite.
    """
    width = max(tokens.shape[1] for tokens, _ in drawn)
    completion_ids = torch.cat([_widen(tokens, width, pad_token_id) for tokens, _ in drawn])  # (B, T)
    kept = completion_mask(completion_ids, eos_token_ids)
    kept &= torch.cat([_widen(torch.ones_like(tokens, dtype=torch.bool), width, False) for tokens, _ in drawn])
    if any(stop_lengths):
        ends = torch.tensor(stop_lengths, device=kept.device).unsqueeze(1)  # (B, 1)
        kept &= (ends == 0) | (torch.arange(width, device=kept.device) < ends)
    logprobs = torch.cat([_widen(chunk, width, 0.0) for _, chunk in drawn]).masked_fill(~kept, 0.0)  # (B, T)
    if not logprobs.isfinite().all():
        raise PolicyDiverged(
            "the policy's logits are not finite: its weights have diverged, or its type cannot hold its activations. "
            "Lower the learning rate, clip gradients, or use float32 or bfloat16 instead of float16."
        )
    reasons = finish_reasons(completion_ids, kept, eos_token_ids)
    return Rollout(
        group_size=group_size,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids.masked_fill(~kept, pad_token_id),
        completion_mask=kept,
        sampling_logprobs=logprobs,
        finish_reasons=["stop" if length else r for length, r in zip(stop_lengths, reasons, strict=True)]
        if stop_lengths
        else reasons,
    )


class _KeyedChoice:
    """A logits processor that draws the next token itself and leaves it as the only possible one."""

    def __init__(
        self,
        sampling: SamplingParams,
        eos: set[int],
        progress: ProgressFn | None,
        should_stop: Callable[[], bool] | None,
        ends: StopWatch,
    ) -> None:
        self.sampling, self.eos = sampling, eos
        self._progress, self._should_stop, self._ends = progress, should_stop, ends
        self._tokens = self._finished_before = 0

    def start(self, *, prompt_width: int, keys: Tensor, first_row: int) -> None:
        self._prompt_width, self._keys, self._first_row = prompt_width, keys, first_row
        self.logprobs: list[Tensor] = []
        self._finished = torch.zeros_like(keys, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted
        position = input_ids.shape[1] - self._prompt_width
        tokens, logprobs = draw_tokens(
            scores,
            uniforms(self._keys, position),
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
        )
        self.logprobs.append(logprobs)
        before = self._finished.clone()
        self._find_ends(tokens)
        self._report(before, last=position + 1 == self.sampling.max_completion_length)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)

    def finished(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """A stopping criterion of ``generate``: (B,) bool."""
        return self._finished

    def _find_ends(self, tokens: Tensor) -> None:
        if self._ends:
            for row in (~self._finished).nonzero().flatten().tolist():
                self._finished[row] = self._ends.found(self._first_row + row, int(tokens[row]))
        for eos in self.eos:
            self._finished |= tokens == eos

    def _report(self, finished_before: Tensor, *, last: bool) -> None:
        if self._progress is None:
            return
        self._tokens += int((~finished_before).sum())
        done = self._finished.numel() if last else int(self._finished.sum())
        self._progress(self._tokens, self._finished_before + done)
        if done == self._finished.numel():
            self._finished_before += done


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


def _widen(tensor: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)
