"""The values that flow through the pipeline, and the legend of tensor axes.

Axes, used in every trailing shape comment:

    P  prompts in the batch            S  prompt tokens, left-padded
    G  completions per prompt          T  completion tokens, right-padded
    B  = P * G completions             V  vocabulary

Completions of one prompt are neighbours: row ``p * G + g`` is sample ``g`` of prompt ``p``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Split = Literal["train", "val", "predict", "greedy"]
FinishReason = Literal["stop", "length"]
Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` (system, user, assistant) and ``content``, a text."""
Conversation = tuple[Message, ...]
"""Turns of which the last is the user's; a system message may come first."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem. Rewards see ``answer`` and ``columns``, the policy sees only ``question``."""

    id: int
    """Stable identity inside its source; part of the sampling key."""
    question: str
    """What is asked, as text; of a conversation of one turn that turn, of a longer one all turns but the system's."""
    answer: str
    """The gold answer, as plain text or LaTeX, without ``\\boxed``; empty where the data set has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the data set, handed to rewards by name."""
    source: str = ""
    """Name of the part of a mixture that the problem comes from; rewards and metrics may go by it."""
    messages: Conversation | None = None
    """The conversation itself, where the data set asks with one; rewards find it in the column ``prompt_messages``."""

    @property
    def asked(self) -> str | Conversation:
        """What a template renders."""
        return self.question if self.messages is None else self.messages


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """Names one completion. With the weights it determines every token drawn (see ``functional.sampling``)."""

    seed: int
    split: Split
    step: int
    """Rollout step that asked for the sample; 0 outside training."""
    attempt: int
    """0 at first; dynamic sampling counts up."""
    prompt_id: int
    sample: int
    """0 … G-1 inside the group."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What an engine returns: completions as tokens, with the log-probabilities they were drawn with."""

    group_size: int
    prompt_ids: Tensor  # (B, S) int64, left-padded
    prompt_mask: Tensor  # (B, S) bool
    completion_ids: Tensor  # (B, T) int64, right-padded
    completion_mask: Tensor  # (B, T) bool: everything up to and including the first EOS
    sampling_logprobs: Tensor  # (B, T) float32, 0 where masked
    finish_reasons: Sequence[FinishReason]  # B
    policy_version: int = 0
    """Optimiser steps the policy had seen when it drew these tokens."""

    @property
    def lengths(self) -> Tensor:
        """Completion tokens per row, shape (B,)."""
        return self.completion_mask.sum(dim=1)
