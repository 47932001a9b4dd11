"""``Term``: a part of the objective that few runs use, with its own fields, formula and hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs


class Ranks(Protocol):
    """The exchanges between ranks that a term may use; every rank must make the same calls in one order."""

    def gather_values(self, values: Tensor) -> Tensor:
        """Concatenates every rank's one-dimensional values."""

    def own_values(self, gathered: Tensor, count: int, device: torch.device) -> Tensor:
        """This rank's ``count`` of what `gather_values` has concatenated."""


@dataclass(frozen=True, kw_only=True)
class CollectedTokens:
    """Input of `Term.prepare`: this rank's tokens of a rollout, before its first update."""

    tokens: Mapping[str, Tensor]  # (B, T) or (B, 1): `advantages`, and what the objective needs, by name
    kept: Tensor  # (B, T) bool: the policy wrote the token, and its completion stays in the loss
    step: int
    ranks: Ranks

    def gather(self, name: str) -> Tensor:
        """(N,) of the kept tokens of the global batch."""
        return self.ranks.gather_values(self.tokens[name].expand_as(self.kept)[self.kept])

    def own(self, chosen: Tensor) -> Tensor:
        """(B, T) bool: this rank's part of ``chosen`` (N,), in the order of `gather`; False where nothing is kept."""
        mask = torch.zeros_like(self.kept)
        mask[self.kept] = self.ranks.own_values(chosen, int(self.kept.sum()), self.kept.device)
        return mask


class Term:
    """A part of the objective. Its hooks are called in the order in which they stand here; each may be left out.

    Subclasses are dataclasses: their fields are arguments in YAML, and their docstring holds formula and source.
    Tensors that `prepare` returns come back as ``tokens.more`` in the later hooks, under their names.
    """

    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, as a configuration holds them."""
        kind: Any = type(self)
        arguments = {field.name: getattr(self, field.name) for field in fields(kind) if field.init}
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}

    @property
    def needs(self) -> Needs:
        """What the pipeline has to compute for this term."""
        return Needs()

    def check(self, algorithm: Any) -> None:
        """Refuses, by ``ValueError``, an objective that the term contradicts."""
        return

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        """Computes tensors (B, T) once for each rollout; all ranks call it."""
        return {}

    def policy_mask(self, tokens: TokenBatch) -> Tensor | None:
        """(B, T) bool: the tokens that carry the policy term; None leaves all of them."""
        return None

    def loss(self, tokens: TokenBatch) -> Tensor | None:
        """(B, T) that is added to the loss of each token, before its weight."""
        return None

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """(B, T) by name, logged as means over the tokens of the rollout."""
        return {}
