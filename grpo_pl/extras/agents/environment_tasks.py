"""``EnvironmentPrompts``: the tasks that an environment brings along, such as a taskset of verifiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.data.rows import RowPrompts, RowReader, Side
from grpo_pl.environment import Environment
from grpo_pl.extras.agents.pool import EnvironmentPool
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class EnvironmentPrompts(RowPrompts):
    """One task of the environment is one problem. They are listed once, at the start, by the interpreter of the
    environment (``Environment.tasks``), and stay in memory."""

    environment: Environment
    """That of the run: in YAML an anchor there (``environment: &mine``), and ``*mine`` here."""
    path: str = field(default="", init=False)
    val_path: str | None = field(default=None, init=False)
    question: str = field(default="question", init=False)
    answer: str | None = field(default="answer", init=False)
    answer_pattern: str = field(default="", init=False)
    bad_rows: Literal["refuse", "drop"] = field(default="refuse", init=False)
    images: bool | ImageLimits = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = type(self.environment).__name__

    def open_rows(self, split: Side) -> RowReader | None:
        if split == "val":
            return None
        with EnvironmentPool(self.environment) as pool:
            tasks = pool.tasks()
        if not tasks:
            raise ValueError(f"{self.path} brings no tasks along: name another data.source.")
        return _TaskReader(self.path, tasks)

    def problem(self, number: int, row: Mapping[str, Any], folder: Path | None = None) -> Problem:
        columns = {name: value for name, value in row.items() if name not in ("question", "answer")}
        return Problem(id=number, question=row["question"], answer=str(row.get("answer", "")), columns=columns)


class _TaskReader(RowReader):
    unit = "task"

    def __init__(self, name: str, tasks: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.tasks = name, tasks

    def scan(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self.tasks)

    def read(self, numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        return (self.tasks[number] for number in numbers)
