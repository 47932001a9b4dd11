"""``TermStates``: what terms of the objective remember from rollout to rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_pl.objective.terms.base import AdaptiveTerm, State
from grpo_pl.objective.terms.hooks import call, fault

if TYPE_CHECKING:
    from grpo_pl.objective.fields import Objective

T = TypeVar("T", bound="Objective")


class TermStates:
    """The states of a run's adaptive terms, by name.

    Raises:
        ValueError: a term raises, or returns something else than its hook is to return.
    """

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._earlier: dict[str, State] = {}

    def adapted(self, algorithm: T) -> T:
        """The objective of the next rollout."""
        for name, term in _adaptive(algorithm).items():
            algorithm = self._returned(type(algorithm), name, term, "adapted", algorithm)
        return algorithm

    def observe(self, algorithm: Objective, means: Callable[[], Mapping[str, float]]) -> None:
        """Takes in the means of a rollout's metrics of tokens, which all ranks compute together if a term asks."""
        adaptive = _adaptive(algorithm)
        found = means() if adaptive else {}
        for name, term in adaptive.items():
            self._states[name] = self._returned(Mapping, name, term, "observed", algorithm, found)

    def metrics(self, algorithm: Objective) -> dict[str, float]:
        """Metrics of a step."""
        return {
            key: value
            for name, term in _adaptive(algorithm).items()
            for key, value in self._returned(Mapping, name, term, "logged").items()
        }

    def _returned(self, kind: Any, name: str, term: AdaptiveTerm, hook: str, *arguments: object) -> Any:
        state = self._states.get(name) or self._earlier.get(term.earlier_entry, {})
        found = call(name, term, hook, *arguments, state)
        if not isinstance(found, kind):
            raise fault(name, f"{hook} returns {type(found).__name__}: give a {kind.__name__}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Entry of a checkpoint."""
        return {name: dict(state) for name, state in self._states.items()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the entry of a checkpoint, and those of version 0.3, which the terms know by name."""
        self._states = {name: dict(state) for name, state in checkpoint.get("terms", {}).items()}
        self._earlier = {"entropy_control": checkpoint.get("entropy_control") or {}}


def _adaptive(algorithm: Objective) -> dict[str, AdaptiveTerm]:
    return {name: term for name, term in algorithm.active_terms.items() if isinstance(term, AdaptiveTerm)}
