"""Columns and metrics that reward functions log besides their rewards, and the trainer state that they may read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any


@dataclass
class LoggedExtras:
    """Columns and metrics that all rewards log during one call on a batch."""

    rows: int
    """Completions of the call."""
    trainer_state: Callable[[], Any] | None = None
    """Returns what functions get as ``trainer_state``; None outside training."""
    kept: bool = True
    """False drops what is logged: where a reward is called again, not for its score but to compare answers."""
    logged: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Column -> who logged it (the name of a reward, with a number from the second call on) -> one value for each
    completion, None where it gave none."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> the values of all calls of ``log_metric``."""

    def columns(self) -> dict[str, list[Any]]:
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

    def collect(self) -> AbstractContextManager[None]:
        """Context manager: rewards that run within it log here."""
        return _use(ExtrasLogger(self, range(self.rows)))


@dataclass(frozen=True)
class ExtrasLogger:
    """Logs for one reward, into the rows of the completions that it was given."""

    extras: LoggedExtras
    rows: Sequence[int]

    def log_extra(self, by: str, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions; what the reward ``by`` logged before under this name is kept.

        Raises:
            ValueError: more or fewer than one value per completion.
        """
        if not self.extras.kept:
            return
        given = list(values)
        if len(given) != len(self.rows):
            raise ValueError(f"log_extra({column!r}) got {len(given)} values for {len(self.rows)} completions.")
        parts = self.extras.logged.setdefault(str(column), {})
        for key in chain([by], (f"{by} {again}" for again in count(2))):
            cells = parts.setdefault(key, [None] * self.extras.rows)
            if all(cells[row] is None for row in self.rows):
                break
        for row, value in zip(self.rows, given, strict=True):
            cells[row] = value

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value to a metric; its mean over all calls of a rollout is logged."""
        if self.extras.kept:
            self.extras.metrics.setdefault(str(name), []).append(float(value))


_DROPS_ALL = ExtrasLogger(LoggedExtras(rows=0, kept=False), range(sys.maxsize))
_current: ContextVar[ExtrasLogger] = ContextVar("grpo_pl_logged_extras", default=_DROPS_ALL)


def current_logger() -> ExtrasLogger:
    """The logger of the running reward; outside `LoggedExtras.collect` a logger that drops everything."""
    return _current.get()


def logging_for(rows: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager: a reward that runs within it was given only ``rows`` of the completions."""
    outer = _current.get()
    return _use(ExtrasLogger(outer.extras, [outer.rows[row] for row in rows]))


@contextmanager
def _use(logger: ExtrasLogger) -> Iterator[None]:
    token = _current.set(logger)  # threads that run rewards get a copy of the context
    try:
        yield
    finally:
        _current.reset(token)
