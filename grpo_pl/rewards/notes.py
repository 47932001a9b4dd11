"""What reward functions log besides their rewards (columns and metrics), and the trainer state that they may read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, count
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
    logged: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Column -> who logged it (the name of a reward, with a number from the second call on) -> one value for each
    completion, None where it gave none."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> the values of all calls of ``log_metric``."""

    @property
    def extra(self) -> dict[str, list[Any]]:
        """Column -> one value for each completion. What several rewards logged under one name is one column if a
        completion has one value of it at most; else each has a column of its own, ``reward/column``."""
        columns: dict[str, list[Any]] = {}
        for column, parts in self.logged.items():
            rows = [[cell for cell in cells if cell is not None] for cells in zip(*parts.values(), strict=True)]
            if all(len(cells) <= 1 for cells in rows):
                columns[column] = [cells[0] if cells else None for cells in rows]
            else:
                columns.update((f"{by}/{column}", cells) for by, cells in parts.items())
        return columns

    def taken(self) -> AbstractContextManager[None]:
        """Context manager: rewards that run within it log here."""
        return _opened(Page(self, range(self.rows)))


@dataclass(frozen=True)
class Page:
    """Where one reward logs: the notes, and the rows of them that belong to the completions it was given."""

    notes: Notes
    rows: Sequence[int]

    def log_extra(self, by: str, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions; what the reward ``by`` logged before under this name is kept.

        Raises:
            ValueError: more or fewer than one value per completion.
        """
        if not self.notes.kept:
            return
        given = list(values)
        if len(given) != len(self.rows):
            raise ValueError(f"log_extra({column!r}) got {len(given)} values for {len(self.rows)} completions.")
        parts = self.notes.logged.setdefault(str(column), {})
        for key in chain([by], (f"{by} {again}" for again in count(2))):
            cells = parts.setdefault(key, [None] * self.notes.rows)
            if all(cells[row] is None for row in self.rows):
                break
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
