"""``Needs``: what a part of the objective asks the pipeline to compute."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from torch import Tensor

TeacherWeights = Literal["model", "start", "live", "average"]


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """What is asked of a teacher that scores the rollout."""

    weights: TeacherWeights = "model"
    """The teacher: a model of its own, or the policy with more in its prompt, as it started, as it is when the rollout
    is scored, or a moving average of its weights."""
    rate: float = 1.0
    """Share of the policy in the average after each rollout."""
    whole: bool = False
    """Its whole distributions are compared, in the forward pass of the update, as ``divergence``; else it gives
    ``teacher_logprobs`` of the tokens."""
    mix: float = 1.0
    """Of the divergence, in the numbering of ``grpo_pl.functional.divergence``."""
    top_k: int = 0
    """Tokens that are compared at each place, the policy's likeliest; 0: the whole vocabulary."""

    @property
    def of_itself(self) -> bool:
        """The teacher is the policy."""
        return self.weights != "model"


class DemonstrationLoss(Protocol):
    """A part of the objective that learns from demonstrations beside the rollout."""

    def share(self, rollout: int) -> float:
        """Part of the loss that goes to the demonstrations of a rollout, in [0, 1]."""

    def losses(self, logprobs: Tensor) -> Tensor:
        """Loss of each of their tokens; any shape."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the pipeline has to compute for a part of the objective; ``a | b`` is what both ask for."""

    old_logprobs: bool = False
    """Log-probabilities of the policy at collection."""
    old_entropy: bool = False
    """Entropies of the policy's next-token distributions at collection, as ``entropy`` in `Term.prepare`."""
    ref_logprobs: bool = False
    """Log-probabilities of the reference, which is loaded for them."""
    reference: bool = False
    """The reference, for the advantages or to log its KL, where the loss does not read it."""
    sampling_logprobs: bool = False
    """Log-probabilities as the engine drew the tokens."""
    entropy: bool = False
    """Entropies now, with a gradient."""
    top_logprobs: int = 0
    """Log-probabilities of so many tokens, the likeliest where the engine drew, as it drew and now."""
    correct: bool = False
    """For each completion, whether the correctness reward accepts it."""
    greedy_values: bool = False
    """Rewards of one greedy completion per prompt, drawn for them."""
    step_rewards: bool = False
    """Rewards of the steps of a completion."""
    turns: bool = False
    """Rewards and states of the turns of an episode."""
    observations: bool = False
    """Log-probabilities of the tokens that the environment wrote, and their ``observation_weights``."""
    teacher: Teaching | None = None
    """A teacher's scores of the rollout."""
    demonstrations: DemonstrationLoss | None = None
    """Demonstrations beside the rollout in each optimiser step."""

    def __or__(self, other: Needs) -> Needs:
        for name in ("teacher", "demonstrations"):
            one, two = getattr(self, name), getattr(other, name)
            if one is not None and two is not None and one != two:
                raise ValueError(f"terms: two of them ask in two ways for {name}: leave out one of them.")
        either = {field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)}
        return Needs(**{**either, "top_logprobs": max(self.top_logprobs, other.top_logprobs)})

    @property
    def start_weights(self) -> bool:
        """A copy of the policy as it started: the reference of the KL, or the teacher."""
        return self.loads_reference or (self.teacher or Teaching()).weights == "start"

    @property
    def loads_reference(self) -> bool:
        """The reference scores the rollout."""
        return self.ref_logprobs or self.reference

    def missing(self, tokens: Container[str]) -> str | None:
        """The first of the tensors that ``loss`` needs, and that is not in ``tokens``."""
        asked = {
            "ref_logprobs": self.ref_logprobs,
            "entropy": self.entropy,
            "sampling_logprobs": self.sampling_logprobs,
            "top_logprobs": self.top_logprobs > 0,
            "observation_weights": self.observations,
            "divergence" if self.teacher and self.teacher.whole else "teacher_logprobs": bool(self.teacher),
        }
        return next((name for name, needed in asked.items() if needed and name not in tokens), None)
