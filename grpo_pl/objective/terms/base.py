"""``Term``: a part of the objective that few runs use, with its own fields, formula and hooks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from grpo_pl.functional.advantages import Baseline, Scale
from grpo_pl.functional.losses import LossOutput
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.types import SamplingParams


class Ranks(Protocol):
    """The exchanges between ranks that a term may use; every rank must make the same calls in one order."""

    def gather_values(self, values: Tensor) -> Tensor:
        """Concatenates every rank's one-dimensional values."""

    def own_values(self, gathered: Tensor, count: int, device: torch.device) -> Tensor:
        """This rank's ``count`` of what `gather_values` has concatenated."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """How the objective compares rewards inside a group; see the fields of `GRPOAlgorithm`."""

    group_size: int = 1
    baseline: Baseline = "group_mean"
    scale: Scale = "group_std"
    ddof: int = 1
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of B episodes, K at most, whole groups in order."""

    rewards: Tensor  # (B, K) float64, weighted, finite
    present: Tensor  # (B, K) bool, the turns that an episode has: its first ones
    invalid_actions: Tensor  # (B, K) bool
    states: Sequence[Sequence[Hashable]]  # of each turn of each episode, where its action was taken
    index: Tensor  # (B, T) the turn of each token, or `NO_TURN`


@dataclass(frozen=True, kw_only=True)
class CollectedTokens:
    """Input of `Term.credit` and `Term.prepare`: this rank's tokens of a rollout, before its first update."""

    tokens: Mapping[str, Tensor]  # (B, T) or (B, 1): `advantages`, and what the objective needs, by name
    kept: Tensor  # (B, T) bool: the policy wrote the token, and its completion stays in the loss
    step: int
    ranks: Ranks
    grouping: Grouping = field(default_factory=Grouping)
    valid: Tensor | None = None  # (B,) bool: the completion has a reward
    steps: tuple[Tensor, Tensor] | None = None  # (B, K) rewards of steps, NaN where none, and the tokens they end at
    turns: Turns | None = None

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

    behind_entropy: ClassVar[bool] = False
    """Its loss is added, and its metrics logged, behind the entropy bonus, so that sums stay those of version 0.3."""

    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, as a configuration holds them."""
        kind: Any = type(self)
        own = fields(kind) if is_dataclass(kind) else ()
        arguments = {field.name: getattr(self, field.name) for field in own if field.init}
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments}

    @property
    def needs(self) -> Needs:
        """What the pipeline has to compute for this term."""
        return Needs()

    @property
    def acts_at_zero(self) -> bool:
        """A completion whose advantages are all 0 still has a gradient, so that it may not be skipped."""
        return any(self.overrides(hook) for hook in ("advantages", "policy_loss", "loss", "extra"))

    @property
    def replaces_rewards(self) -> bool:
        """Rewards are only measured: all advantages are 0, and no completion leaves the loss for its rewards."""
        return False

    def overrides(self, hook: str) -> bool:
        """True if the term's class has a hook of its own."""
        return getattr(type(self), hook) is not getattr(Term, hook)

    def check(self, algorithm: Any) -> None:
        """Refuses, by ``ValueError``, an objective that the term contradicts."""
        return

    def check_run(self, *, sampling: SamplingParams, in_environment: bool) -> None:
        """Refuses, by ``ValueError``, a run that the term contradicts."""
        return

    def credit(self, collected: CollectedTokens) -> Tensor | None:
        """(B, T) advantages of tokens in the place of those of completions, once for each rollout."""
        return None

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        """Computes tensors (B, T) once for each rollout; all ranks call it."""
        return {}

    def advantages(self, advantages: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        """The advantages (B, T) or (B, 1) of a micro-batch, from those so far; ``tokens`` as in `GRPOAlgorithm.loss`,
        not masked."""
        return advantages

    def policy_loss(self, tokens: TokenBatch) -> Tensor | None:
        """(B, T) that is added to the policy term of each token, before the masks of all terms and the weight against
        another sampler."""
        return None

    def policy_mask(self, tokens: TokenBatch) -> Tensor | None:
        """(B, T) bool: the tokens that carry the policy term; None leaves all of them."""
        return None

    def loss(self, tokens: TokenBatch) -> Tensor | None:
        """(B, T) that is added to the loss of each token, before its weight."""
        return None

    def extra(self, tokens: Mapping[str, Tensor]) -> LossOutput | None:
        """A scalar that is added to the loss with a normaliser of its own, and metrics as sums and counts; ``tokens``
        as in `GRPOAlgorithm.loss`, not masked."""
        return None

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """(B, T) by name, logged as means over the tokens of the rollout."""
        return {}


State = Mapping[str, Any]
"""What an `AdaptiveTerm` remembers from rollout to rollout, of JSON types; kept in checkpoints."""


class AdaptiveTerm(Term):
    """A term that changes a field of the objective from rollout to rollout, such as a coefficient. Its methods are
    functions of a state, which begins empty. What the objective needs, and which completions are learned from, is
    decided by the configured one: declare in ``needs`` what a changed field asks for."""

    earlier_entry = ""
    """Entry of a checkpoint in which version 0.3 kept the state."""

    def adapted(self, algorithm: Any, state: State) -> Any:
        """The objective for the updates of the next rollout."""
        raise NotImplementedError

    def observed(self, algorithm: Any, means: Mapping[str, float], state: State) -> State:
        """The state after a rollout.

        Args:
            algorithm: the objective as it is configured.
            means: of the metrics of tokens in its updates.
        """
        raise NotImplementedError

    def logged(self, state: State) -> Mapping[str, float]:
        """Metrics of a step."""
        return {}
