"""``Distillation``: learns from a teacher's distributions at the tokens that the policy has drawn itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from grpo_pl.functional.advantages import reweighed
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs, Teaching
from grpo_pl.objective.terms.base import Term

Divergence = Literal["none", "forward_kl", "reverse_kl", "jensen_shannon"]
TeacherAdvantage = Literal["add", "reweigh"]


@dataclass(frozen=True, kw_only=True)
class Distillation(Term):
    """Without a ``divergence``, A + coef · (log π_T − sg(log π)) of each token, with the policy as it is now, so that
    r · A has the gradient of the per-prefix KL(π‖π_T) however old the policy is that drew the tokens; ``advantage:
    reweigh`` multiplies instead, see ``grpo_pl.functional.advantages.reweighed``. With one, coef · D(π_T, π) over the
    whole vocabulary in the loss of each token. The teacher is ``model.teacher``, or one for each part of a mixture,
    ``model.teachers``.

    Source: on-policy distillation, Lu and Thinking Machines Lab, 2025; GKD, arXiv:2306.13649, eq. 1; RLSD,
    arXiv:2604.03128.

    Raises:
        ValueError: a field is out of its range or belongs to another choice, or an objective that cannot use them.
    """

    behind_entropy: ClassVar[bool] = True

    divergence: Divergence = "none"
    """KL(teacher‖π), KL(π‖teacher), or the mixture's, m · KL(teacher‖M) + (1 − m) · KL(π‖M) with M = m · teacher +
    (1 − m) · π; none takes the log-ratio at the drawn token as an advantage."""
    mix: float = 0.5
    """The share m of the teacher in jensen_shannon, in (0, 1) (GKD's beta)."""
    top_k: int = 0
    """Compare only this many tokens at each place, the policy's likeliest, both distributions renormalised over them
    (TRL's distillation_topk); 0: the whole vocabulary."""
    coef: float = 1.0
    """Weight of the teacher: of its part of the advantage, in [0, 1] for reweigh, or of the divergence."""
    advantage: TeacherAdvantage = "add"
    """The teacher's part of the advantage. reweigh: A times (1 − c) + c · clip(exp(sign(A)(log π_T − log π)), 1 − clip,
    1 + clip) with c = coef, so that the reward decides the direction and the teacher how much a token counts."""
    clip: float = 0.2
    """Bound of the factor in reweigh, in [0, 1)."""
    alone: bool = False
    """Learn from the teacher only: rewards are measured, but make no advantages; completions that none can judge are
    learned from as well."""

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, Divergence)
        check_choice("advantage", self.advantage, TeacherAdvantage)
        if not 0 < self.mix < 1:
            raise ValueError(f"mix must lie in (0, 1), whose ends are forward_kl and reverse_kl, got {self.mix}.")
        if self.top_k < 0 or self.top_k == 1:
            raise ValueError(
                f"top_k must be 0 (off) or 2 or more, since one token alone has probability 1, got {self.top_k}."
            )
        if not 0 < self.coef < math.inf:
            raise ValueError(f"coef is the teacher's weight: set it above 0 and finite, got {self.coef}.")
        if not 0 <= self.clip < 1:
            raise ValueError(f"clip must lie in [0, 1), got {self.clip}.")
        if self.top_k > 0 and self.divergence == "none":
            raise ValueError("top_k belongs to a divergence, and divergence is none: set top_k 0.")
        if self.reweighs:
            if self.divergence != "none":
                raise ValueError(f"advantage reweigh and divergence {self.divergence} would ask the teacher twice.")
            if self.alone:
                raise ValueError("advantage reweigh needs advantages of rewards: set alone false.")
            if self.coef > 1:
                raise ValueError(f"advantage reweigh takes coef as a share, at most 1, got {self.coef}.")

    @property
    def reweighs(self) -> bool:
        """The teacher multiplies the advantages of rewards."""
        return self.advantage == "reweigh"

    @property
    def needs(self) -> Needs:
        return Needs(teacher=self._teaching())

    def _teaching(self) -> Teaching:
        ends = {"forward_kl": 0.0, "reverse_kl": 1.0}
        mix = ends.get(self.divergence, self.mix)
        return Teaching(whole=self.divergence != "none", mix=mix, top_k=self.top_k)

    @property
    def acts_at_zero(self) -> bool:
        return not self.reweighs

    @property
    def replaces_rewards(self) -> bool:
        return self.alone

    def check(self, algorithm: Any) -> None:
        name = type(self).__name__
        others = [term for term in algorithm.active_terms.values() if term is not self]
        if any(isinstance(term, Distillation) for term in others):
            raise ValueError("terms: Distillation and SelfDistillation would ask two teachers: leave out one of them.")
        if self.divergence == "none":
            if algorithm.surrogate == "nll":
                raise ValueError("surrogate nll ignores advantages, the teacher's among them: set another surrogate.")
            if algorithm.ratio_level == "geometric":
                raise ValueError(
                    f"ratio_level geometric has one objective per completion, {name} one advantage per token: set "
                    "ratio_level token or sequence."
                )
            credited = next((type(term).__name__ for term in others if term.overrides("credit")), None)
            if credited:
                raise ValueError(f"terms: {name} and {credited} would each make advantages: set a divergence.")
        if self.alone:
            self._check_alone(algorithm)

    @staticmethod
    def _check_alone(algorithm: Any) -> None:
        if algorithm.baseline != "none" or algorithm.scale != "none":
            raise ValueError("alone makes no advantages of rewards: set baseline none and scale none.")
        credited = [type(t).__name__ for t in algorithm.active_terms.values() if t.overrides("credit")]
        if credited:
            raise ValueError(f"alone has no use for {credited[0]}: leave out one of the two.")
        if algorithm.overlong_buffer > 0 or algorithm.kl_in_reward or algorithm.max_rewards:
            raise ValueError(
                "alone leaves rewards alone: set overlong_buffer 0, max_rewards false, and kl_placement loss or beta 0."
            )
        if algorithm.samples != "all" or algorithm.dynamic_sampling:
            raise ValueError("alone takes every completion as it comes: set samples all and dynamic_sampling false.")

    def advantages(self, advantages: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        if self.divergence != "none":
            return advantages
        gap = _gap(tokens, tokens["logprobs"])
        if self.reweighs:
            return reweighed(advantages, gap, share=self.coef, clip=self.clip)
        return advantages + self.coef * gap

    def loss(self, tokens: TokenBatch) -> Tensor | None:
        return None if self.divergence == "none" else self.coef * self._divergence(tokens)

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        found = {}
        if self.divergence != "none":
            found["teacher/divergence"] = self._divergence(tokens)
        else:
            found["teacher/kl"] = -_gap(tokens.more, tokens.logprobs)
        if "taught" in tokens.more:
            found["teacher/taught"] = tokens.more["taught"].to(tokens.logprobs.dtype).expand_as(tokens.logprobs)
        return found

    @staticmethod
    def _divergence(tokens: TokenBatch) -> Tensor:
        return tokens.more["divergence"].masked_fill(~_taught(tokens.more), 0.0)


def _taught(tokens: Mapping[str, Tensor]) -> Tensor:
    """(B, T) bool: the policy's tokens of completions that have a teacher."""
    mask = tokens["mask"]
    return mask & tokens["taught"] if "taught" in tokens else mask


def _gap(tokens: Mapping[str, Tensor], logprobs: Tensor) -> Tensor:
    """log π_T − sg(log π), 0 where there is no teacher."""
    return (tokens["teacher_logprobs"] - logprobs.detach()).masked_fill(~_taught(tokens), 0.0)
