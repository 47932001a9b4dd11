"""Progress of the stages of a step and of long tasks: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_EVERY_SECONDS = 10.0
"""Interval between lines where the output is not a terminal."""


class Advance(Protocol):
    """Reports that ``done`` units are done, with a short note such as the current loss."""

    def __call__(self, done: int, note: str = "") -> None: ...


class ProgressCallback(Protocol):
    """Called by the stages of a step to report progress; see ``StepCallback.on_stage_progress``."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(title: str, total: int, console: Console | None = None) -> Iterator[Advance]:
    """Shows how far a task of ``total`` units is; yields the function to report with."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console
        ) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda done, note="": bar.update(task, completed=done, note=note)
    else:
        yield _lines(title, total, console)


def _lines(title: str, total: int, console: Console) -> Advance:
    last = [time.monotonic() - LOG_EVERY_SECONDS]

    def advance(done: int, note: str = "") -> None:
        if done >= total or time.monotonic() - last[0] >= LOG_EVERY_SECONDS:
            last[0] = time.monotonic()
            console.print(f"{title}: {done}/{total} {note}".rstrip(), highlight=False, soft_wrap=True)

    return advance


class Heartbeat:
    """Prints now and then how much is done of what has no known length; nothing in the first ten seconds."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title, self._console, self._done = title, console or Console(stderr=True), 0
        self._last = time.monotonic()

    def add(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        if time.monotonic() - self._last >= LOG_EVERY_SECONDS:
            self._last = time.monotonic()
            self._console.print(f"{self._title}: {self._done}", highlight=False, soft_wrap=True)
