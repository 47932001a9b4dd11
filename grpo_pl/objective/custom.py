"""Parts of the objective that a user brings as a class: ``AdvantageEstimator`` and ``SurrogateObjective``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from grpo_pl.functional.trust_region import LikelyTokens
from grpo_pl.objective.needs import Needs


@dataclass(frozen=True, kw_only=True)
class RewardedGroups:
    """Input of an ``AdvantageEstimator``: the global batch, every rank's completions. None if nobody declared it."""

    rewards: Tensor  # (P, G) float64: weighted sum, with the overlong penalty and the KL where these are on
    valid: Tensor  # (P, G) bool: some reward was computed; elsewhere `rewards` says nothing
    lengths: Tensor  # (P, G) tokens that the policy wrote
    truncated: Tensor  # (P, G) bool: cut off by a limit
    correct: Tensor | None  # (P, G) bool
    greedy: Tensor | None  # (P,) float64: reward of the prompt's greedy completion
    old_logprobs: Tensor | None  # (P, G) Σ_t log π at collection
    ref_logprobs: Tensor | None  # (P, G) Σ_t log π_ref
    entropy: Tensor | None  # (P, G) mean over the completion's tokens, at collection


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Input of a ``SurrogateObjective`` and of terms: a micro-batch, (B, T) each, 0 where ``mask`` is False. None if
    nobody declared it."""

    logprobs: Tensor  # of the policy now; carries the gradient
    old_logprobs: Tensor  # at collection, with mismatch in_ratio as noted while sampling; `logprobs` if nothing moved
    ratio: Tensor  # π / π_old at `ratio_level`
    log_ratio: Tensor  # log π − log π_old of each token
    advantages: Tensor  # or (B, 1), one for all tokens
    mask: Tensor  # bool
    ref_logprobs: Tensor | None
    entropy: Tensor | None  # of the next-token distribution now; carries a gradient
    sampling_logprobs: Tensor | None  # as the engine drew them
    likely: LikelyTokens | None = None  # where a term asks for `top_logprobs`
    more: Mapping[str, Tensor] = field(default_factory=dict)  # all tokens by name, as terms prepared them; not masked


class _Declared:
    """Declares the tensors that the pipeline computes for a part."""

    needs_old_logprobs: ClassVar[bool] = False
    """Log-probabilities of the policy at collection."""
    needs_ref_logprobs: ClassVar[bool] = False
    """Log-probabilities of the reference, which is loaded for it."""
    needs_entropy: ClassVar[bool] = False
    """Entropies of the next-token distributions."""


class AdvantageEstimator(_Declared, ABC):
    """A class for ``algorithm.baseline``: rewards of the global batch to advantages, which ``scale`` still divides."""

    needs_correct: ClassVar[bool] = False
    """For each completion, whether the correctness reward accepts it."""
    needs_greedy_baseline: ClassVar[bool] = False
    """One greedy completion per prompt, drawn and scored."""

    @property
    def needs(self) -> Needs:
        """What it declares."""
        return Needs(
            old_logprobs=self.needs_old_logprobs,
            reference=self.needs_ref_logprobs,
            old_entropy=self.needs_entropy,
            correct=self.needs_correct,
            greedy_values=self.needs_greedy_baseline,
        )

    @abstractmethod
    def __call__(self, groups: RewardedGroups) -> Tensor:
        """(P, G) advantages; what stands where ``groups.valid`` is False is ignored."""

    def checked(self, groups: RewardedGroups) -> Tensor:
        """The advantages in float64, 0 where not valid; refuses missing inputs and results that are not finite."""
        name = type(self).__name__
        for need in ("old_logprobs", "ref_logprobs", "entropy", "correct"):
            if getattr(self, f"needs_{need}") and getattr(groups, need) is None:
                raise ValueError(f"{name} declares needs_{need}: pass {need} to advantages.")
        found = self(groups).double()
        if found.shape != groups.rewards.shape or not found[groups.valid].isfinite().all():
            raise ValueError(
                f"{name} returned {tuple(found.shape)} with values such as {found.flatten()[:8]}: "
                f"give finite advantages of shape {tuple(groups.rewards.shape)}."
            )
        return found.masked_fill(~groups.valid, 0.0)


class SurrogateObjective(_Declared, ABC):
    """A class for ``algorithm.surrogate``: what is maximised per token."""

    needs_sampling_logprobs: ClassVar[bool] = False
    """Log-probabilities as the engine drew the tokens."""

    @property
    def needs(self) -> Needs:
        """What it declares."""
        return Needs(
            old_logprobs=self.needs_old_logprobs,
            ref_logprobs=self.needs_ref_logprobs,
            entropy=self.needs_entropy,
            sampling_logprobs=self.needs_sampling_logprobs,
        )

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> Tensor:
        """(B, T), differentiable in ``tokens.logprobs`` or ``tokens.ratio``; masked tokens are ignored."""

    def checked(self, tokens: TokenBatch) -> Tensor:
        """The same; refuses another shape."""
        found = self(tokens)
        if found.shape != tokens.logprobs.shape:
            raise ValueError(
                f"{type(self).__name__} returned {tuple(found.shape)}: give one number per token, "
                f"{tuple(tokens.logprobs.shape)}."
            )
        return found
