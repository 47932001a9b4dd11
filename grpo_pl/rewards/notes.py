"""What reward functions log besides their rewards (columns and metrics), and the trainer state that they may read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Notes:
    """What all rewards log during one call on a batch."""

    rows: int
    """Completions of the call."""
    trainer_state: Callable[[], Any] | None = None
    """Returns what functions get as ``trainer_state``; None outside training."""
    kept: bool = True
    """False if what is logged is dropped: where a reward is called again, not for its score but to compare answers."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> one value per completion, None where no function gave one."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> the values of all calls of ``log_metric``."""

    def taken(self) -> AbstractContextManager[None]:
        """Context manager: rewards that run within it log here."""
        return _opened(Page(self, range(self.rows)))


@dataclass(frozen=True)
class Page:
    """Where one reward logs: the notes, and the rows of them that belong to the completions it was given."""

    notes: Notes
    rows: Sequence[int]

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions.

        Raises:
            ValueError: more or fewer than one value per completion, or the column has values there already.
        """
        if not self.notes.kept:
            return
        given = list(values)
        if len(given) != len(self.rows):
            raise ValueError(f"log_extra({column!r}) got {len(given)} values for {len(self.rows)} completions.")
        cells = self.notes.extra.setdefault(str(column), [None] * self.notes.rows)
        if any(cells[row] is not None for row in self.rows):
            raise ValueError(f"log_extra({column!r}) was called twice for the same completions: choose another name.")
        for row, value in zip(self.rows, given, strict=True):
            cells[row] = value

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value to a metric; its mean over all calls of a rollout is logged."""
        if self.notes.kept:
            self.notes.metrics.setdefault(str(name), []).append(float(value))


_UNREAD = Page(Notes(rows=0, kept=False), range(sys.maxsize))
_current: ContextVar[Page] = ContextVar("grpo_pl_reward_notes", default=_UNREAD)


def current_page() -> Page:
    """Where the running reward logs; outside `Notes.taken` a page that drops everything."""
    return _current.get()


def page_of(rows: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager: a reward that runs within it was given only ``rows`` of the completions of the current page."""
    page = _current.get()
    return _opened(Page(page.notes, [page.rows[row] for row in rows]))


@contextmanager
def _opened(page: Page) -> Iterator[None]:
    token = _current.set(page)  # threads that run rewards get a copy of the context
    try:
        yield
    finally:
        _current.reset(token)
