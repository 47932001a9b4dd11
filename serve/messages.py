"""Messages between the HTTP process and the worker that holds the model."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_pl.rollout.native.continuous import SequenceOptions
from serve.grammars import Grammar


class Part(NamedTuple):
    """One prompt of a request: one completion is drawn per key."""

    prompt_ids: list[int]
    keys: list[int]
    options: SequenceOptions


class Draw(NamedTuple):
    """Request to draw completions, which are numbered through all prompts; each has as many keys."""

    parts: list[Part]
    grammar: Grammar | None = None
    """Grammar that the completions must match; None for no grammar."""
    evaluation: bool = False


class ScorePrompt(NamedTuple):
    """Request for the log-probabilities of a prompt's own tokens, and of the ``top`` likeliest at each position."""

    prompt_ids: list[int]
    top: int


class Joined(NamedTuple):
    """Message that so many further completions of a request have got a slot, and the name of the weights."""

    uid: int
    slots: int
    version: str


class Drew(NamedTuple):
    """The tokens drawn in one step, as columns: request, index of the completion, and those of ``Drawn``."""

    columns: list[tuple[Any, ...]]
