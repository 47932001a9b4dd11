"""The few exchanges between ranks that a step needs; each is the identity in a single process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Gathers and sums over the ranks of the default process group. Every rank must make the same calls in order."""

    rank: int = 0
    world: int = 1

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenates every rank's ``rows`` along dim 0, in rank order; shapes must agree."""
        if self.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def max(self, value: int, device: torch.device) -> int:
        """The largest of every rank's integer."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def ratios(self, sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """(sum, count) per name to the ratio of both totals over ranks; names must be the same on every rank.

        A name whose count is 0 everywhere is left out: there is nothing to report.
        """
        if not sums:
            return {}
        packed = torch.stack([torch.stack([s.double(), c.double()]) for s, c in sums.values()])  # (names, 2)
        totals = self.sum(packed).tolist()
        return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}
