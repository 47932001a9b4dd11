"""Columns and metrics that reward functions log besides their rewards, and the trainer state that they may read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any


@dataclass(frozen=True)
class LoggedExtras:
    """Columns and metrics that rewards log during one call on a batch, and what one of them logs with."""

    completions: int
    """How many the call is about."""
    trainer_state: Callable[[], Any] | None = None
    """Returns what functions get as ``trainer_state``; None outside training."""
    kept: bool = True
    """False drops what is logged: where a reward is called again, not for its score but to compare answers."""
    rows: Sequence[int] | None = None
    """The completions that the running reward was given; None for all."""
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

    def log_extra(self, by: str, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions; what the reward ``by`` logged before under this name is kept.

        Values are kept as JSON has them: those of NumPy and PyTorch as Python's, numbers that are not finite as None.

        Raises:
            ValueError: more or fewer than one value per completion.
        """
        if not self.kept:
            return
        given, rows = list(values), range(self.completions) if self.rows is None else self.rows
        if len(given) != len(rows):
            raise ValueError(f"log_extra({column!r}) got {len(given)} values for {len(rows)} completions.")
        parts = self.logged.setdefault(str(column), {})
        for key in chain([by], (f"{by} {again}" for again in count(2))):
            cells = parts.setdefault(key, [None] * self.completions)
            if all(cells[row] is None for row in rows):
                break
        for row, value in zip(rows, given, strict=True):
            cells[row] = _plain(value)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value to a metric; its mean over all calls of a rollout is logged."""
        if self.kept:
            self.metrics.setdefault(str(name), []).append(float(value))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager: rewards that run within it log here."""
        token = _current.set(self)  # threads that run rewards get a copy of the context
        try:
            yield
        finally:
            _current.reset(token)


def _plain(value: Any) -> Any:
    if callable(to_python := getattr(value, "tolist", None)):
        value = to_python()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple | Set) else value


_DROPS_ALL = LoggedExtras(0, kept=False)
_current: ContextVar[LoggedExtras] = ContextVar("grpo_pl_logged_extras", default=_DROPS_ALL)


def current_extras() -> LoggedExtras:
    """Where the running reward logs; outside `LoggedExtras.collect` all is dropped."""
    return _current.get()


def logging_for(rows: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager: a reward that runs within it was given only ``rows`` of the completions."""
    outer = _current.get()
    return replace(outer, rows=rows if outer.rows is None else [outer.rows[row] for row in rows]).collect()
