"""Messages between the HTTP process and the workers."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from grpo_pl.rollout.grammars import Grammar
from grpo_pl.rollout.native.continuous import SequenceOptions

T = TypeVar("T")


def drained(queue: SimpleQueue[T], *, wait: bool = True) -> list[T]:
    """All that is in a queue; ``wait`` waits for the first."""
    found = [queue.get()] if wait else []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found


class Cancel(NamedTuple):
    """Message that a request is cancelled, or only its completions with these indices."""

    indices: frozenset[int] | None = None


class Answer(NamedTuple):
    """The complete answer to a request."""

    uid: int
    data: Any


class Failure(NamedTuple):
    """The end of a request that failed, with the error for its client."""

    uid: int
    message: str
    status: int = 500
    param: str | None = None
    code: str = "worker_error"


class Part(NamedTuple):
    """One prompt of a request: one completion is drawn per key."""

    prompt_ids: list[int]
    keys: list[int]
    options: SequenceOptions
    inputs: bytes | None = None  # what the policy reads beside the tokens


class Draw(NamedTuple):
    """Request to draw completions, which are numbered through all prompts; each has as many keys."""

    parts: list[Part]
    grammar: Grammar | None = None
    """Grammar that the completions must match; None for no grammar."""

    @property
    def size(self) -> int:
        """Number of completions."""
        return len(self.parts) * len(self.parts[0].keys)


class ScorePrompt(NamedTuple):
    """Request for the log-probabilities of a prompt's own tokens, and of the ``top`` likeliest at each position."""

    prompt_ids: list[int]
    top: int


class Drew(NamedTuple):
    """The tokens drawn in one step by one policy, as columns: request, index of the completion, those of ``Drawn``."""

    version: str
    columns: list[tuple[Any, ...]]


class Followed(NamedTuple):
    """The name of new weights, or why the newest checkpoint is passed over."""

    version: str
    error: str = ""
