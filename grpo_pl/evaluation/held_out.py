"""Computes the metrics of held-out problems, per set and per source, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, SumMetric

from grpo_pl.evaluation.metrics import AverageAtK, GroupMetric, MeanReward, PassAtK, correctness_metrics
from grpo_pl.functional.estimates import Estimate, estimate_mean
from grpo_pl.rewards.base import Reward, Score, correctness_index, needs_of
from grpo_pl.rewards.batch import score_completions
from grpo_pl.rewards.logged_extras import LoggedExtras
from grpo_pl.rewards.voting import answer_classes
from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import CUT_OFF, PromptBatch, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The number of completions of each held-out problem, their sampling, and their metrics."""

    samples: int = 4
    """Completions per problem, for pass@1, pass@``samples`` and maj@``samples``."""
    temperature: float = 1.0
    """Temperature of these completions."""
    top_p: float = 1.0
    """Probability mass of the nucleus from which these completions are sampled; 1 is off."""
    greedy: bool = True
    """Also answer each problem once greedily, logged as ``val/greedy``, where a reward has ``correctness``."""
    pass_at: list[int] | None = None
    """Values of k for pass@k; null takes 1 and ``samples``."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"validation.samples must be at least 1, got {self.samples}.")
        bad = [k for k in self.ks if not 1 <= k <= self.samples]
        if bad:
            raise ValueError(f"validation.pass_at holds {bad[0]}: pass@k needs 1 <= k <= samples={self.samples}.")

    @property
    def ks(self) -> list[int]:
        """The values of k for pass@k, in ascending order."""
        return sorted({1, self.samples} if self.pass_at is None else set(self.pass_at))

    def sampling(self, training: SamplingParams) -> SamplingParams:
        """The parameters of the sampled completions: those of training (length, stop strings …) but with the
        temperature and nucleus of validation, and without top-k."""
        return replace(
            training, temperature=self.temperature, top_p=self.top_p, top_k=0, sampling_mask=False, top_logprobs=0
        )


def named_rewards(rewards: Sequence[Reward]) -> list[str]:
    """The names of the held-out metrics of rewards without a ``correctness`` one: ``reward``, their weighted sum, and
    ``rewards/<name>`` for each. Empty if one says what a right answer is, because then that is measured."""
    return [] if correctness_index(rewards) is not None else ["reward", *(f"rewards/{each.name}" for each in rewards)]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The verdicts on n completions of each of P problems."""

    correct: Tensor  # (P, n) bool; false without a correctness reward
    judged: Tensor  # (P, n) bool: the correctness reward, or without one the sum, is a number
    classes: Tensor  # (P, n) int64, see ``answer_classes``
    lengths: Tensor  # (P, n) tokens that the policy wrote
    truncated: Tensor  # (P, n) bool: cut off by a limit
    noted: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Metric -> the values that the reward logged with ``log_metric``."""
    samples: Samples | None = None
    """The completions that were judged."""
    scores: Sequence[Score] = ()
    """P·n scores of the correctness reward; without one those of ``ScoredBatch.judged``."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)  # (P, n) float64 each, NaN for no value
    """By the names of `named_rewards`; empty with a correctness reward."""


def grade(
    rewards: Sequence[Reward],
    samples: Samples,
    *,
    vote: bool = True,
    trainer_state: Callable[[], Any] | None = None,
) -> Answers:
    """Scores every completion with the correctness reward, or without one with all.

    Args:
        rewards: all rewards.
        samples: P problems with n completions each.
        vote: also find out which wrong answers are equal, for maj@k; otherwise each wrong answer is its own class.
        trainer_state: see ``score_completions``.
    """
    columns, n, judge = samples.columns(needs_of(rewards)), samples.rollout.group_size, correctness_index(rewards)
    asked = rewards if judge is None else [rewards[judge]]
    answers = [prompt.answer for prompt in samples.per_row]
    scored = score_completions(
        asked, completions=samples.completions, answers=answers, columns=columns, trainer_state=trainer_state
    )
    scores = scored.judged()
    correct = [score is True for score in scored.correct()]
    classes = [0 if c else row + 1 for row, c in enumerate(correct)]
    if vote and judge is not None:
        with LoggedExtras(0, trainer_state, kept=False).collect():
            classes = answer_classes(
                rewards[judge], completions=samples.completions, scores=scores, columns=columns, group_size=n
            )
    device = samples.rollout.completion_ids.device
    totals = [math.nan if total is None else total for total in scored.totals()]
    values = torch.tensor([totals, *scored.values()], dtype=torch.float64, device=device).unflatten(1, (-1, n))
    truncated = [reason in CUT_OFF for reason in samples.rollout.finish_reasons]
    return Answers(
        correct=torch.tensor(correct, device=device).view(-1, n),
        judged=torch.tensor([score.value is not None for score in scores], device=device).view(-1, n),
        classes=torch.tensor(classes, device=device).view(-1, n),
        lengths=samples.rollout.action_lengths.view(-1, n),
        truncated=torch.tensor(truncated, device=device).view(-1, n),
        noted=scored.metrics,
        samples=samples,
        scores=scores,
        rewards=dict(zip(named_rewards(rewards), values, strict=False)),
    )


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """One metric of one group of held-out problems."""

    mean: float
    problems: dict[int, float]
    """The metric of each problem, by the problem's id."""

    def estimate(self) -> Estimate:
        """The mean with its confidence interval."""
        return estimate_mean(torch.tensor(list(self.problems.values()), dtype=torch.float64))


_READ = {"maj": "classes", "mean_length": "lengths", "clipped_ratio": "truncated"}
"""Metric -> the field of ``Answers`` that it is computed from; ``correct`` for all other metrics."""


class HeldOutMetrics:
    """The metrics of one validation, the same ones for every group of problems.

    Completions that could not be judged count neither as right nor as wrong; `unjudged` returns how many there are.

    Args:
        validation: which metrics are computed.
        rewards: those of the run, whose means take the place of pass@k where none has ``correctness``.
        groups: names of all groups, equal on all ranks: ``val`` or ``val/<set>``. A metric's key is
            ``<group>/<metric>``.
        device: the device on which metrics are exchanged between ranks.
    """

    def __init__(
        self,
        validation: Validation,
        rewards: Sequence[Reward],
        groups: Sequence[str],
        device: torch.device,
    ) -> None:
        self.metrics: dict[str, GroupMetric] = {}
        self.noted: dict[str, list[float]] = {}
        """Extra values that rewards logged on this rank."""
        self._named, self._samples = named_rewards(rewards), validation.samples
        self._names: list[str] = []  # of the metrics of each group
        self._unjudged = {group: SumMetric() for group in groups}
        self._right, self._judged = ({group: AverageAtK(self._samples) for group in groups} for _ in range(2))
        for group in groups:
            named: dict[str, GroupMetric] = {name: MeanReward() for name in self._named}
            if not self._named:
                named = correctness_metrics(validation.ks, self._samples)
            named |= {name: AverageAtK(self._samples) for name in ("mean_length", "clipped_ratio")}
            named |= {"greedy": PassAtK(1)} if validation.greedy and not self._named else {}
            self.metrics |= {f"{group}/{name}": metric for name, metric in named.items()}
            self._names = list(named)
        counts: list[Metric] = [*self._unjudged.values(), *self._right.values(), *self._judged.values()]
        for metric in (*self.metrics.values(), *counts):
            metric.to(device)

    def update(self, batch: PromptBatch, sampled: Answers, greedy: Answers | None) -> None:
        """Adds the problems of a batch to the groups that they belong to; ``greedy`` is needed if validation asks for
        greedy answers."""
        device = sampled.correct.device
        ids = torch.tensor([prompt.id for prompt in batch.prompts], device=device)
        rows = list(zip(batch.valid, batch.groups, strict=True))
        both = [answers for answers in (sampled, greedy) if answers is not None]
        for group, unjudged in self._unjudged.items():  # also without problems: a metric without an update cannot sync
            member = torch.tensor([valid and group in groups for valid, groups in rows], device=device)
            for name in self._names:
                answers = greedy if name == "greedy" else sampled
                assert answers is not None
                values = answers.rewards.get(name)
                if values is None:
                    values = getattr(answers, _READ.get(name.partition("@")[0], "correct"))
                self.metrics[f"{group}/{name}"].update(values, member, ids, answers.judged)
            self._right[group].update(sampled.correct & sampled.judged, member, ids)
            self._judged[group].update(sampled.judged, member, ids)
            for answers in both:
                unjudged.update((~answers.judged[member]).sum())
        for answers in both:
            for name, logged in answers.noted.items():
                self.noted.setdefault(name, []).extend(logged)

    def results(self) -> dict[str, MetricResult]:
        """The metrics that have at least one problem, over all ranks; every rank must call it."""
        found = {
            key: MetricResult(mean=metric.compute().item(), problems=metric.results())
            for key, metric in self.metrics.items()
        }
        return {key: measured for key, measured in found.items() if measured.problems}

    def counts(self) -> dict[str, dict[int, tuple[int, int]]]:
        """By group: how many of the sampled completions of each problem, by id, are right, and how many were judged,
        over all ranks; every rank must call it. Empty without a correctness reward."""
        if self._named:
            return {}
        shares = {group: (self._right[group].results(), self._judged[group].results()) for group in self._unjudged}
        return {
            group: {i: (round(right[i] * self._samples), round(judged[i] * self._samples)) for i in right}
            for group, (right, judged) in shares.items()
        }

    def unjudged(self) -> dict[str, int]:
        """The number of completions of each group that could not be judged, over all ranks; every rank must call it."""
        return {group: int(metric.compute()) for group, metric in self._unjudged.items()}
