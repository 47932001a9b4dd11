"""Exchanges between ranks that a step needs; in a single process each returns its input."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_pl.rewards.base import RewardFailed
from grpo_pl.rollout.engine import EngineDied, RolloutInterrupted

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Gathers and sums over ranks that have prompts of their own; all must make the same calls in one order."""

    rank: int = 0
    world: int = 1

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenates every rank's ``rows`` along dim 0, in rank order; shapes must agree."""
        if self.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def gather_values(self, values: Tensor) -> Tensor:
        """Concatenates every rank's one-dimensional ``values``, which may differ in length."""
        if self.world == 1:
            return values
        return torch.cat([part.to(values.device) for part in self.gather_objects(values.cpu())])

    def own_values(self, gathered: Tensor, count: int, device: torch.device) -> Tensor:
        """This rank's ``count`` of what ``gather_values`` has concatenated."""
        counts = self.gather_rows(torch.tensor([count], device=device))
        first = int(counts[: self.rank].sum())
        return gathered[first : first + count]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order; it is pickled, so use it only for rare and small exchanges."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """What the iterator that ``make`` returns in the first process brings, in every process.

        Raises:
            ValueError: it failed in the first process, which raises the error itself.
        """
        if self.world == 1:
            yield from make()
            return
        made: Iterator[T] | None = None
        while True:
            found: list[T] = []
            error: Exception | None = None
            if self.rank == 0:
                try:
                    made = make() if made is None else made
                    found = list(islice(made, 1))
                except Exception as caught:  # a source or an environment of the user's may raise anything
                    error = caught
            found, told = self.gather_objects((found, error and failure_line(error)))[0]
            if error is not None:
                raise error
            if told:
                raise ValueError(f"the first process failed: {told}")
            if not found:
                return
            yield found[0]

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def max(self, value: int, device: torch.device) -> int:
        """The largest of every process's integer."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def any(self, flag: bool, device: torch.device) -> bool:
        """True if any process's flag is set."""
        return bool(self.max(int(flag), device))

    def interruptible(self, draw: Callable[[], T], device: torch.device) -> T:
        """Returns ``draw()``; if it raises on any rank, every rank raises: ``RolloutInterrupted`` if any does, else
        ``EngineDied`` if that is the only error, else its own error, or ``ValueError`` with the first of another's."""
        drawn: T | None = None
        error: Exception | None = None
        try:
            drawn = draw()
        except Exception as caught:  # an engine or an environment of the user's may raise anything
            error = caught
        grave = 0 if error is None else 1 if isinstance(error, EngineDied) else 2
        grave = 3 if isinstance(error, RolloutInterrupted) else grave
        worst = self.max(grave, device)
        told = self.gather_objects(failure_line(error) if error and grave == 2 else None) if worst == 2 else []
        if error is not None and grave == worst:
            raise error
        if worst == 3:
            raise RolloutInterrupted("another process was told to stop") from error
        if worst == 2:
            raise ValueError(f"the rollout of another process failed: {next(filter(None, told))}") from error
        if worst == 1:
            raise EngineDied("the engine's process of another rank ended.")
        return cast(T, drawn)

    def scored(self, score: Callable[[], T], device: torch.device) -> T:
        """Returns ``score()``; if it raises on any rank, every rank raises ``RewardFailed`` with the first message."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = score()
        except Exception as caught:  # a user's reward may raise anything
            error = caught
        if self.any(error is not None, device):
            told = next(line for line in self.gather_objects(error and failure_line(error)) if line)
            raise RewardFailed(told) from error
        return cast(T, result)

    def ratios(self, sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Name -> Σ sum / Σ count over all ranks, for scalar (sum, count) pairs by name; names must agree on all ranks.

        A name whose count is 0 on all ranks is left out.
        """
        if not sums:
            return {}
        packed = torch.stack([torch.stack([s.double(), c.double()]) for s, c in sums.values()])  # (names, 2)
        totals = self.sum(packed).tolist()
        return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}


def failure_line(error: Exception) -> str:
    """One line with the exception, its notes (the reward's name), and the file and line that raised it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    notes = "; ".join(getattr(error, "__notes__", []))
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return f"{text}{', ' if notes else ''}{notes} ({frame.f_code.co_filename}, line {line})"
