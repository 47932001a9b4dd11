"""Parts that engines share: drawing and recording tokens, stopping, padding, making a `Rollout` and joining several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.functional.sampling import (
    Noise,
    draw_tokens,
    kept_tokens,
    likeliest_tokens,
    row_key,
    sample_key,
    truncate_logits,
)
from grpo_pl.rollout.engine import PolicyDiverged, RolloutInterrupted, Watching
from grpo_pl.rollout.texts import TextStream
from grpo_pl.types import NO_TOKEN, NO_TURN, NO_VERSION, GenerateRequest, Rollout, RowInputs, SampleKey

LEFT = ("prompt_ids", "prompt_mask")
"""Tensors of a `Rollout` whose rows are padded on the left; all others are on the right."""
_FILL = {"turn_index": NO_TURN, "policy_version": NO_VERSION, "support": NO_TOKEN, "top_ids": NO_TOKEN}
_MOST_RECORDED = 1 << 29  # numbers of 4 bytes each: 2 GiB


class DecodeMonitor:
    """Follows a rollout between two tokens: draws, records, finds the rows that have ended, reports and stops.

    Attributes:
        texts: the text of each row, if a stop string may end it; else empty.
    """

    def __init__(self, request: GenerateRequest, **watching: Unpack[Watching]) -> None:
        assert request.sampling.thinking_budget is None, "draw_completions keeps to a budget, engines do not"
        self.request, self.sampling, self.eos = request, request.sampling, set(request.eos_token_ids)
        self.limits = None if request.limits is None else request.row_limits
        self.texts: list[TextStream] = []
        if (stops := request.stops) is not None:
            rows = len(request.keys) * request.group_size
            self.texts = [TextStream(stops.tokenizer, stops.texts, prefix=stops.prefix) for _ in range(rows)]
        self._progress, self._should_stop = watching.get("progress"), watching.get("should_stop")
        self._tokens = self._finished = 0
        self._supports: list[tuple[Tensor, int, Tensor]] = []  # rows, position, tokens left to draw from
        self._tops: list[tuple[Tensor, Tensor | int, Tensor, Tensor]] = []  # as `record_top` got them

    def check_stop(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted

    def follow(self, tokens: int, finished: int) -> None:
        """Reports progress and stops; for a kernel that draws all rows in one call, which does not call `alive`."""
        self.check_stop()
        if self._progress is not None:
            self._progress(tokens, finished)

    def draw(self, logits: Tensor, noise: Noise, rows: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of ``rows`` at ``position``. With ``sampling_mask`` it records the tokens that
        truncation left of the logits (rows, V), with ``top_logprobs`` the likeliest of them."""
        sampling = self.sampling
        top_k, top_p = sampling.top_k, sampling.top_p
        if sampling.temperature == 0.0 or not (sampling.sampling_mask or sampling.top_logprobs):
            return draw_tokens(logits, noise, temperature=sampling.temperature, top_k=top_k, top_p=top_p)
        cut = truncate_logits(logits.float() / sampling.temperature, top_k=top_k, top_p=top_p)
        if sampling.sampling_mask:
            self._supports.append((rows, position, kept_tokens(cut)))
        if sampling.top_logprobs:
            self.record_top(rows, position, *likeliest_tokens(cut, sampling.top_logprobs))
        return draw_tokens(cut, noise, temperature=1.0)

    def support(self, kept: Tensor) -> Tensor | None:
        """(B, T, K) int32, as in `Rollout`, of the tokens in the mask ``kept`` (B, T); None if nothing was recorded.

        Raises:
            ValueError: it would take too much memory.
        """
        if not self._supports:
            return None
        places = kept.shape[1]  # what was drawn behind the end of a row does not count
        shown = [
            (rows, position, ids.masked_fill(~kept[rows, position].unsqueeze(1), NO_TOKEN))
            for rows, position, ids in self._supports
            if position < places
        ]
        width = max(int((ids != NO_TOKEN).sum(dim=1).max()) for _, _, ids in shown)
        if kept.numel() * width > _MOST_RECORDED:
            raise ValueError(
                f"sampling_mask: up to {width} tokens were left to draw from, too many to record at each of "
                f"{kept.numel()} places: set model.sampling.top_k, or a lower top_p."
            )
        support = torch.full((*kept.shape, width), NO_TOKEN, dtype=torch.int32, device=kept.device)
        for rows, position, ids in shown:
            support[rows, position, : ids.shape[1]] = ids[:, :width]
        return support

    def record_top(self, rows: Tensor, positions: Tensor | int, ids: Tensor, logprobs: Tensor) -> None:
        """Records the likeliest tokens of ``rows`` at ``positions``, both (rows, K), with the same K in every call."""
        self._tops.append((rows, positions, ids, logprobs))

    def top(self, kept: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """``Rollout.top_ids`` and ``top_logprobs``, both (B, T, K), of the tokens in the mask ``kept`` (B, T); None if
        nothing was recorded.

        Raises:
            ValueError: they would take too much memory.
        """
        if not self._tops:
            return None, None
        width = self._tops[0][2].shape[1]
        if kept.numel() * width > _MOST_RECORDED:
            raise ValueError(
                f"the {width} likeliest tokens at each of {kept.numel()} places are too many to record: lower "
                "the top_k of the term that asks for them."
            )
        ids = torch.full((*kept.shape, width), NO_TOKEN, dtype=torch.int32, device=kept.device)
        logprobs = torch.full(ids.shape, -torch.inf, device=kept.device, dtype=torch.float32)
        for rows, positions, tokens, theirs in self._tops:
            if isinstance(positions, int) and positions >= kept.shape[1]:
                continue  # drawn behind the end of every row
            ids[rows, positions], logprobs[rows, positions] = tokens, theirs
        return ids.masked_fill(~kept.unsqueeze(2), NO_TOKEN), logprobs.masked_fill(~kept.unsqueeze(2), -torch.inf)

    def read_ahead(self, drawn: Tensor, rows: Tensor, alive: Sequence[bool], first: int) -> None:
        """Decodes the tokens of several positions at once, for `alive` to be asked about each of them; a call of the
        tokenizer for every token takes longer than a GPU to draw it.

        Args:
            drawn: (positions, rows), on the CPU.
            rows: (rows,), their numbers.
            alive: which of them go on at the first of the positions.
            first: that position.
        """
        for row, goes_on, tokens in zip(rows.tolist(), alive, drawn.T.tolist(), strict=True):
            if goes_on and self.texts:
                room = len(tokens) if self.limits is None else min(len(tokens), self.limits[row] - first)
                end = next((i for i, token in enumerate(tokens[:room]) if token in self.eos), room)
                self.texts[row].push(tokens[:end])
                self.texts[row].push(tokens[end : end + 1])

    def alive(
        self, tokens: Tensor, rows: Tensor, *, last: bool, position: int | None = None, ahead: bool = False
    ) -> list[bool]:
        """For each of ``rows``: true if it goes on after the token that it has drawn.

        Args:
            last: none of them has room for another.
            position: of that token, for rows with limits of their own.
            ahead: `read_ahead` has read it, and perhaps more.
        """
        if last or not (self.eos or self.texts):
            alive = [not last] * len(tokens)
        else:
            alive = [token not in self.eos for token in tokens.tolist()]
        if self.limits is not None and position is not None:
            alive = [
                goes_on and position + 1 < self.limits[row] for goes_on, row in zip(alive, rows.tolist(), strict=True)
            ]
        if self.texts:
            for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                text = self.texts[row]
                if not ahead:
                    text.push([token])
                alive[i] &= not (text.stopped and (position is None or len(text.tokens) <= position + 1))
        self._tokens += len(alive)
        self._finished += len(alive) - sum(alive)
        if self._progress is not None:
            self._progress(self._tokens, self._finished)
        return alive


def row_keys(keys: Sequence[Sequence[SampleKey]]) -> list[int]:
    """One 64-bit sampling key a row, from (P, G) sample names to (B,) integers."""
    return [sample_key(key) for group in keys for key in group]


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(ids, mask), both (len(rows), S), the rows ending at the right edge."""
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side="left")
    real = [torch.ones_like(row, dtype=torch.bool) for row in tensors]
    return ids, pad_sequence(real, batch_first=True, padding_side="left")


def completion_mask(completion_ids: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """(B, T) bool: every token up to and including the first EOS. By position, so padding may equal EOS."""
    is_eos = torch.zeros_like(completion_ids, dtype=torch.bool)
    for eos in eos_token_ids:  # few: faster than torch.isin
        is_eos |= completion_ids == eos
    eos_before = is_eos.cumsum(dim=1) - is_eos.long()
    return eos_before == 0


def assemble(
    monitor: DecodeMonitor, *, prompt_ids: Tensor, prompt_mask: Tensor, drawn: Sequence[tuple[Tensor, Tensor]]
) -> Rollout:
    """One rollout from chunks of consecutive rows: (tokens, log-probabilities), both (rows, T) with T per chunk.

    What follows a row's first EOS is arbitrary and is masked here.

    Args:
        monitor: has followed the drawing of these rows.
        prompt_ids: (B, S), left-padded.
        prompt_mask: likewise.

    Raises:
        PolicyDiverged: a log-probability is NaN or infinite.
    """
    eos_token_ids, pad_token_id, texts = monitor.eos, monitor.request.pad_token_id, monitor.texts
    completion_ids = _joined([tokens for tokens, _ in drawn], pad_token_id)  # (B, T)
    kept = completion_mask(completion_ids, monitor.request.eos_token_ids)
    kept &= _joined([torch.ones_like(tokens, dtype=torch.bool) for tokens, _ in drawn], False)
    if monitor.limits is not None:
        limits = torch.tensor(monitor.limits, device=kept.device).unsqueeze(1)  # (B, 1)
        kept &= torch.arange(kept.shape[1], device=kept.device) < limits
    for row, text in enumerate(texts):
        if text.stopped:
            kept[row, len(text.tokens) :] = False
    logprobs = _joined([chunk for _, chunk in drawn], 0.0).masked_fill(~kept, 0.0)  # (B, T)
    if not logprobs.isfinite().all():
        raise PolicyDiverged(
            "the policy's logits are not finite: its weights have diverged, or its type cannot hold its activations. "
            "Lower the learning rate, clip gradients, or use float32 or bfloat16 instead of float16."
        )
    top_ids, top_logprobs = monitor.top(kept)
    last = completion_ids.gather(1, kept.sum(dim=1, keepdim=True) - 1).squeeze(1).tolist()
    return Rollout(
        group_size=monitor.request.group_size,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids.masked_fill(~kept, pad_token_id),
        completion_mask=kept,
        sampling_logprobs=logprobs,
        support=monitor.support(kept),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reasons=[
            "stop" if token in eos_token_ids or (texts and texts[row].stopped) else "length"
            for row, token in enumerate(last)
        ],
        inputs=monitor.request.row_inputs,
    )


def join_rollouts(rollouts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """Rollouts one after the other, all with the group size of the first one, padded to the widest of them."""
    fill = {**_FILL, "top_logprobs": -torch.inf, "prompt_ids": pad_token_id, "completion_ids": pad_token_id}
    tensors: dict[str, Any] = {
        name: _joined([getattr(rollout, name) for rollout in rollouts], fill.get(name, 0), left=name in LEFT)
        for name in rollout_tensors(rollouts[0])
    }
    reasons = [reason for rollout in rollouts for reason in rollout.finish_reasons]
    return replace(rollouts[0], finish_reasons=reasons, inputs=_joined_inputs(rollouts), **tensors)


def _joined_inputs(rollouts: Sequence[Rollout]) -> RowInputs | None:
    if all(rollout.inputs is None for rollout in rollouts):
        return None
    none = ((rollout, [None] * len(rollout.finish_reasons)) for rollout in rollouts)
    return RowInputs([each for rollout, empty in none for each in (rollout.inputs.of if rollout.inputs else empty)])


def rollout_tensors(rollout: Rollout) -> dict[str, Any]:
    """The tensors of a rollout by name, without those that it lacks."""
    return {name: tensor for name, tensor in vars(rollout).items() if torch.is_tensor(tensor)}


def _joined(parts: Sequence[Tensor], fill: float, *, left: bool = False) -> Tensor:
    """Tensors (rows, …) below one another, padded to the widest along every further axis."""
    sizes = [max(part.shape[axis] for part in parts) for axis in range(parts[0].dim() - 1, 0, -1)]  # the last one first
    padded = []
    for part in parts:
        missing = [size - own for size, own in zip(sizes, part.shape[:0:-1], strict=True)]
        padded.append(pad(part, [n for each in missing for n in ((each, 0) if left else (0, each))], value=fill))
    return torch.cat(padded)


def sample_keys(prompt_ids: Sequence[int], *, seed: int, n: int, prompt_id: int | str | None = None) -> list[SampleKey]:
    """Keys of ``n`` samples outside training: split ``predict``, step 0, and ``prompt_id`` or a hash of the tokens.

    Together with the weights they determine the completions, so any engine reproduces what a server drew.
    """
    if prompt_id is None:
        name = row_key("prompt", *prompt_ids)
    else:
        name = prompt_id if isinstance(prompt_id, int) else row_key("id", prompt_id)
    return [SampleKey(seed=seed, split="predict", step=0, attempt=0, prompt_id=name, sample=i) for i in range(n)]
