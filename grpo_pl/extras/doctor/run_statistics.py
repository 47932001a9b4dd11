"""``RunStatistics``: what was measured of a run, as plain numbers, None where it was not; and ``Finding``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from grpo_pl.functional.estimates import Estimate

MIN_GROUPS, MIN_ROLLOUTS = 12, 3
"""Fewer say nothing about shares."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The fields of a configuration that the rules read."""

    group_size: int
    prompts_per_update: float
    """Prompts that one optimiser step averages over."""
    rollouts: int
    """Rollouts of the whole run."""
    temperature: float
    length: int
    """Most tokens of a completion."""
    plays: bool = False
    """The policy acts in an environment, so a question is not the whole problem."""
    cold_start: bool = False
    untaught: bool = False
    """A policy from scratch without a cold start."""
    half_precision: bool = False
    """The weights that the optimiser moves are of 16 bits."""
    float32_on_gpu: bool = False
    """The policy computes in float32 on a GPU."""


@dataclass(frozen=True, kw_only=True)
class ProblemStatistics:
    """Of the problems, before any rollout or in the first ones."""

    train: int
    """Training problems that were looked at."""
    held_out: int = 0
    """In the smallest set of them."""
    repeated: int = 0
    """Training problems that ask what an earlier one asks."""
    leaked: int = 0
    """Held-out problems whose very question is trained on or demonstrated."""
    texts: int = 0
    """Prompts, gold answers and demonstrations whose characters were looked at."""
    unwritable: int = 0
    """Those of them with characters that the tokenizer cannot write."""
    characters: str = ""
    """Some of these, for the message."""
    prompts: int = 0
    """Training and held-out problems whose length was looked at."""
    too_long: int = 0
    """Those of them that leave no room for a completion."""


@dataclass(frozen=True, kw_only=True)
class AnswerStatistics:
    """Of the rewards of answers that are known to be right or empty."""

    golds: int
    """Gold answers that were tried, each in several forms."""
    refused: int
    """Those of them that the correctness reward pays less than 1 in all forms, or cannot judge against."""
    accepted_form: bool
    """Some gold answer is paid in one of the forms, so they include the one that the reward reads; or the
    demonstrations of more than three problems in four are paid."""
    empty_right: float
    """Share of the problems for which an empty completion counts as right."""
    empty_total: float | None = None
    """Mean weighted reward of an empty completion."""
    best_total: float | None = None
    """Mean over the problems of the largest weighted reward of any form."""
    demonstrations: int = 0
    demonstrations_paid: int = 0
    """Those of them that the correctness reward pays in full."""
    scored_again: int = 0
    """Completions that were scored twice."""
    differed: int = 0
    """Those of them that got another value the second time."""
    differing: str = ""
    """Name of the reward that did so."""
    end_chance: float | None = None
    """The largest probability of an end token at any place of a few completions."""
    empties: dict[str, float] = field(default_factory=dict)
    """Mean value of an empty completion, by reward."""


@dataclass(frozen=True, kw_only=True)
class RewardStatistics:
    """Of the values of one reward in one rollout."""

    name: str
    weight: float
    correctness: bool
    least: float | None
    most: float | None
    earned: bool = True
    """0 means that nothing was earned; a penalty of 0 is none."""
    form: bool = False
    """It pays for the form of a completion alone."""
    equal_texts: int = 0
    """Completions that some other one of their group repeats word for word."""
    differed: int = 0
    """Those of them that got another value than it."""


@dataclass(frozen=True, kw_only=True)
class RolloutStatistics:
    """Of one rollout and its updates."""

    groups: int
    completions: int
    mixed: int
    """Groups whose weighted rewards differ."""
    mixed_answers: int
    """Groups whose correctness rewards differ."""
    right: int
    cut: int
    """Completions that a limit ended."""
    cut_unpaid: int
    """Those of them that the correctness reward gave nothing, and in which it found no answer, if it tells that."""
    cut_right: int
    no_answer: int
    """Completions in which the correctness reward found no answer."""
    identical: int
    """Groups whose completions are all the same."""
    left_out: int = 0
    """Episodes without a value, and the reason of the first."""
    left_out_by: str = ""
    failed: int = 0
    """Episodes that failed and count, because the policy is held to be at fault; and the reason of the first."""
    failed_by: str = ""
    questions: int = 0
    """Different questions, and different prompts made of them."""
    prompts: int = 0
    gap: float | None = None
    """Weighted reward of right completions less that of wrong ones, mean over the groups that have both."""
    rewards: tuple[RewardStatistics, ...] = ()
    rate: float = 1.0
    """Learning rate as a share of its peak."""
    weight_change: float | None = None
    """‖Δθ‖ / ‖θ‖ of a sample of the weights."""
    moved: float | None = None
    """Share of that sample that changed at all."""
    logprob_change: float | None = None
    """Mean |Δ log π| of a token of this rollout over its updates, in nats."""
    kl: float | None = None
    """Mean exp(Δ) − 1 − Δ of these tokens, an estimate of the KL divergence to the policy before the updates."""
    entropy: float | None = None
    """Mean entropy of these tokens after the updates, in nats."""
    clipped: float | None = None
    """Share of tokens outside the clip range."""
    skipped: int = 0
    """Updates that were not made because their loss or gradient was not finite."""
    swapped: int = 0
    """Held-out problems that were answered twice, with their own images and with those of another one."""
    unmoved: int = 0
    """Those of them that got the same answer, drawn with the same noise."""
    bfloat16_gain: float | None = None
    """Seconds of a step in float32 / seconds in bfloat16 on this machine's CPU."""


@dataclass(frozen=True, kw_only=True)
class RunStatistics:
    """All that the rules see."""

    settings: RunSettings
    problems: ProblemStatistics | None = None
    answers: AnswerStatistics | None = None
    rollouts: Sequence[RolloutStatistics] = ()
    held_out: Estimate | None = None
    """Share of right answers to held-out problems, in the last validation."""

    @property
    def enough(self) -> bool:
        """True if there were enough groups for shares of them to mean something."""
        return len(self.rollouts) >= MIN_ROLLOUTS and self.total("groups") >= MIN_GROUPS

    def total(self, name: str) -> int:
        """A count of the rollouts, added up."""
        return sum(getattr(rollout, name) for rollout in self.rollouts)

    def share(self, name: str, of: str = "completions") -> float:
        """A count of the rollouts as a share of another; 0 of nothing."""
        return self.total(name) / max(1, self.total(of))

    def mean(self, value: Callable[[RolloutStatistics], float | None]) -> float | None:
        """Over the rollouts in which it was measured; None where it was in none."""
        found = [one for rollout in self.rollouts if (one := value(rollout)) is not None]
        return fmean(found) if found else None

    @cached_property
    def rewards(self) -> list[RewardStatistics]:
        """The values of each reward over all rollouts."""
        return [
            replace(
                parts[0],
                least=min((part.least for part in parts if part.least is not None), default=None),
                most=max((part.most for part in parts if part.most is not None), default=None),
                equal_texts=sum(part.equal_texts for part in parts),
                differed=sum(part.differed for part in parts),
            )
            for parts in zip(*(rollout.rewards for rollout in self.rollouts), strict=True)
        ]


@dataclass(frozen=True)
class Finding:
    """A state that will hinder learning."""

    code: str
    name: str
    figure: float
    """The measured value; its unit is in the sentence."""
    sentence: str
    field: str
    """The setting to change."""
    fix: str = ""
    """YAML that changes it, for a pretrained policy."""

    def __str__(self) -> str:
        return f"{self.code} {self.name}: {self.sentence} Change {self.field}."

    def with_fix(self) -> str:
        """The line of the finding, and below it the YAML to paste, if it has any."""
        if not self.fix:
            return str(self)
        told = "  What may mend it, as a file of its own (fit --config yours.yaml --config it.yaml):"
        return "\n".join([str(self), told, *(f"    {line}" for line in self.fix.splitlines())])
