"""``RolloutEngine``: the contract between the pipeline and whatever draws completions, and what engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.functional.sampling import Noise, draw_tokens, kept_tokens, likeliest_tokens, sample_key, truncate_logits
from grpo_pl.rollout.texts import TextStream
from grpo_pl.types import NO_TOKEN, GenerateRequest, Rollout, SampleKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NOTED = 1 << 29  # numbers of 4 bytes each: 2 GiB
ProgressFn = Callable[[int, int], None]
"""Called as ``progress(tokens_drawn, completions_finished)`` now and then while an engine works."""


class RolloutEngine(ABC):
    """Draws completions from a policy: from its live weights, or from a copy of its own."""

    updates: int = 0
    """How many updates the policy has had, one a rollout, those before a resume included; the pipeline sets it."""
    keeps_support: bool = False
    """Whether rollouts have their `Rollout.support` where ``sampling_mask`` asks for it."""
    keeps_top: bool = False
    """Whether rollouts have their `Rollout.top_ids` and ``top_logprobs`` where ``SamplingParams.top_logprobs`` asks for
    them."""
    weights_version: int | None = None
    """Of an engine that keeps a copy: ``updates`` when it took that."""
    max_tokens: int | None = None
    """Most tokens of a prompt and its completion, where the engine itself sets a limit below the model's context."""
    memory_bytes: int | None = None
    """Of an engine with a process of its own: what that takes besides the weights at any time; 0 for those on other
    hosts. None for one that keeps keys and values of all rows while it draws."""

    @property
    def drawing_engine(self) -> RolloutEngine:
        """The engine whose code draws: this one, or that which it runs elsewhere."""
        return self

    @abstractmethod
    def generate(
        self,
        model: PreTrainedModel,
        request: GenerateRequest,
        *,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        """Draws what ``request`` asks for. All ranks call it together.

        Args:
            model: the policy, on its device; its train/eval mode is the same before and after.
            progress: told how far the work is. It and ``should_stop`` belong to this call and not to the request, which
                is pickled for other processes, split among servers, and drawn again where one of them dies.
            should_stop: asked between tokens; once true, the call raises `RolloutInterrupted`.

        Raises:
            RolloutInterrupted: ``should_stop`` turned true.
            EngineDied: the engine draws in a process of its own, which ended.
        """

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        """What draws the turns of episodes while the weights stay as they are: whole contexts are given to `generate`
        again and again, and those that begin with an earlier one and its completion may reuse what was computed.

        Args:
            rows: most contexts at once.
        """
        return self

    def describe(self) -> str:
        """What drew the completions so far, in a few words for the log."""
        return type(self).__name__

    def check(self) -> None:  # noqa: B027 - most engines need nothing
        """Called before a run costs anything.

        Raises:
            ValueError: the engine cannot work here, and what to install.
        """

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - in-process engines need none
        """Called by all ranks together before each rollout, for what a sharded policy needs all of them for."""

    def update_weights(self, model: PreTrainedModel) -> None:  # noqa: B027 - in-process engines read the live weights
        """Called once after each weight update, for engines that keep a copy: the next ``generate`` must draw from the
        new weights."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Called when a fit or a validation is over: ends what the engine has started; it starts anew if used again."""


class RolloutInterrupted(RuntimeError):
    """``should_stop`` turned true in the middle of a rollout; its completions are gone and must not be counted."""

    signal: Signals | None = None
    """Which signal asked this process to stop, if one did."""


class EngineDied(RuntimeError):
    """The process that an engine draws in has ended. The rollout can be drawn again: keys name its samples."""

    def __init__(self, message: str = "", *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
        """Whether it was tried for long enough already."""


class PolicyDiverged(ValueError):
    """The policy's logits are not finite: nothing can be drawn from it."""

    last_checkpoint: Path | None = None
    """The newest checkpoint of the run, where there is one."""

    def __str__(self) -> str:
        newest = self.last_checkpoint
        hint = f" The newest checkpoint is {newest}; start from one that was saved before the metrics went astray."
        return super().__str__() + (hint if newest is not None else "")


class DecodeMonitor:
    """What is asked and told between two tokens: whether to stop, which rows have ended, how far the work is.

    Attributes:
        texts: the text of each row, where a stop string may end it; else empty.
    """

    def __init__(
        self, request: GenerateRequest, *, progress: ProgressFn | None, should_stop: Callable[[], bool] | None
    ) -> None:
        self.request, self.sampling, self.eos = request, request.sampling, set(request.eos_token_ids)
        self.texts: list[TextStream] = []
        if (stops := request.stops) is not None:
            rows = len(request.keys) * request.group_size
            self.texts = [TextStream(stops.tokenizer, stops.texts, prefix=stops.prefix) for _ in range(rows)]
        self._progress, self._should_stop = progress, should_stop
        self._tokens = self._finished = 0
        self._supports: list[tuple[Tensor, int, Tensor]] = []  # rows, position, what was left to draw from
        self._tops: list[tuple[Tensor, Tensor | int, Tensor, Tensor]] = []  # as `note_top` got them

    def check_stop(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted

    def report(self, tokens: int, finished: int) -> None:
        """How far the work is, by what draws all rows in one call, in place of `alive`."""
        if self._progress is not None:
            self._progress(tokens, finished)

    def draw(self, logits: Tensor, noise: Noise, rows: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of ``rows`` at ``position``, as the parameters say; with ``sampling_mask``
        notes what truncation left of the logits (rows, V), with ``top_logprobs`` the likeliest of them."""
        sampling = self.sampling
        top_k, top_p = sampling.top_k, sampling.top_p
        if sampling.temperature == 0.0 or not (sampling.sampling_mask or sampling.top_logprobs):
            return draw_tokens(logits, noise, temperature=sampling.temperature, top_k=top_k, top_p=top_p)
        cut = truncate_logits(logits.float() / sampling.temperature, top_k=top_k, top_p=top_p)
        if sampling.sampling_mask:
            self._supports.append((rows, position, kept_tokens(cut)))
        if sampling.top_logprobs:
            self.note_top(rows, position, *likeliest_tokens(cut, sampling.top_logprobs))
        return draw_tokens(cut, noise, temperature=1.0)

    def support(self, completion_ids: Tensor) -> Tensor | None:
        """(B, T, K) int32 beside ``completion_ids`` (B, T), as `Rollout` has it; None where nothing was noted.

        Raises:
            ValueError: it would take too much memory.
        """
        if not self._supports:
            return None
        width = max(kept.shape[1] for _, _, kept in self._supports)
        if completion_ids.numel() * width > _MOST_NOTED:
            raise ValueError(
                f"sampling_mask: up to {width} tokens were left to draw from, too many to note at each of "
                f"{completion_ids.numel()} places: set model.sampling.top_k, or a lower top_p."
            )
        support = torch.full((*completion_ids.shape, width), NO_TOKEN, dtype=torch.int32, device=completion_ids.device)
        for rows, position, kept in self._supports:
            support[rows, position, : kept.shape[1]] = kept
        return support

    def note_top(self, rows: Tensor, positions: Tensor | int, ids: Tensor, logprobs: Tensor) -> None:
        """Notes the likeliest tokens of ``rows`` at ``positions``, both (rows, K), the same K in every call."""
        self._tops.append((rows, positions, ids, logprobs))

    def top(self, kept: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """``Rollout.top_ids`` and ``top_logprobs``, both (B, T, K), where the mask ``kept`` (B, T) says that the policy
        wrote; None where nothing was noted.

        Raises:
            ValueError: they would take too much memory.
        """
        if not self._tops:
            return None, None
        width = self._tops[0][2].shape[1]
        if kept.numel() * width > _MOST_NOTED:
            raise ValueError(
                f"the {width} likeliest tokens at each of {kept.numel()} places are too many to note: lower "
                "model.algorithm.trust_region_top_k."
            )
        ids = torch.full((*kept.shape, width), NO_TOKEN, dtype=torch.int32, device=kept.device)
        logprobs = torch.full(ids.shape, -torch.inf, device=kept.device, dtype=torch.float32)
        for rows, positions, tokens, theirs in self._tops:
            ids[rows, positions], logprobs[rows, positions] = tokens, theirs
        return ids.masked_fill(~kept.unsqueeze(2), NO_TOKEN), logprobs.masked_fill(~kept.unsqueeze(2), -torch.inf)

    def alive(self, tokens: Tensor, rows: Tensor, *, last: bool) -> list[bool]:
        """Which of ``rows`` go on after drawing ``tokens``."""
        if last or not (self.eos or self.texts):
            alive = [not last] * len(tokens)
        else:
            alive = [token not in self.eos for token in tokens.tolist()]
        if self.texts:
            for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                self.texts[row].push([token])
                alive[i] &= not self.texts[row].stopped
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
    given = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    ids = pad_sequence(given, batch_first=True, padding_value=pad, padding_side="left")
    real = [torch.ones_like(row, dtype=torch.bool) for row in given]
    return ids, pad_sequence(real, batch_first=True, padding_side="left")


def completion_mask(completion_ids: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """(B, T) bool: every token up to and including the first EOS. By position, so padding may equal EOS."""
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(list(eos_token_ids)))
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
    width = max(tokens.shape[1] for tokens, _ in drawn)
    completion_ids = torch.cat([_widen(tokens, width, pad_token_id) for tokens, _ in drawn])  # (B, T)
    kept = completion_mask(completion_ids, monitor.request.eos_token_ids)
    kept &= torch.cat([_widen(torch.ones_like(tokens, dtype=torch.bool), width, False) for tokens, _ in drawn])
    for row, text in enumerate(texts):
        if text.stopped:
            kept[row, len(text.tokens) :] = False
    logprobs = torch.cat([_widen(chunk, width, 0.0) for _, chunk in drawn]).masked_fill(~kept, 0.0)  # (B, T)
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
        support=monitor.support(completion_ids),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reasons=[
            "stop" if token in eos_token_ids or (texts and texts[row].stopped) else "length"
            for row, token in enumerate(last)
        ],
    )


def _widen(tensor: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)
