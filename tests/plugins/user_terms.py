"""Terms of the objective as a user would write them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import AdaptiveTerm, CollectedTokens, State, Term


@dataclass(frozen=True, kw_only=True)
class PulledBack(AdaptiveTerm):
    """strength · (log π − log π_ref)² of the tokens where the policy was less sure than on average as it drew; the
    strength halves after each rollout."""

    strength: float
    """Weight of the squared distance in the first rollout."""

    @property
    def needs(self) -> Needs:
        return Needs(old_entropy=True, ref_logprobs=True)

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        return {"unsure": collected.tokens["entropy"] > collected.gather("entropy").mean()}

    def loss(self, tokens: TokenBatch) -> Tensor:
        return self.strength * self._distance(tokens) * tokens.more["unsure"]

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {"pulled/unsure": tokens.more["unsure"].float(), "pulled/distance": self._distance(tokens)}

    def adapted(self, algorithm: Any, state: State) -> Any:
        now = replace(self, strength=state.get("strength", self.strength))
        terms = {name: now if term is self else term for name, term in algorithm.terms.items()}
        return replace(algorithm, terms=terms)

    def observed(self, algorithm: Any, means: Mapping[str, float], state: State) -> State:
        return {"strength": state.get("strength", self.strength) / 2, "unsure": means["pulled/unsure"]}

    def logged(self, state: State) -> Mapping[str, float]:
        return {"pulled/strength": state["strength"]}

    @staticmethod
    def _distance(tokens: TokenBatch) -> Tensor:
        assert tokens.ref_logprobs is not None
        return (tokens.logprobs - tokens.ref_logprobs).square()


@dataclass(frozen=True, kw_only=True)
class Failing(Term):
    """Raises in one of its hooks."""

    hook: str

    def __post_init__(self) -> None:
        object.__setattr__(self, self.hook, self._raise)

    def _raise(self, *arguments: Any, **more: Any) -> Any:
        raise KeyError(f"of {self.hook}")


@dataclass(frozen=True, kw_only=True)
class Logging(Term):
    """Logs 1 for each token under a name."""

    key: str

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {self.key: tokens.mask.float()}
