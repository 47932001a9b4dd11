"""``StepLog``: what a run says of a step: its metrics, warnings once in a run, and that the run has diverged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.distributed.collective import Collective
from grpo_pl.rewards.base import Reward
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import broken_share, experience_metrics, noted_means
from grpo_pl.training.optimization import TrainingDiverged
from grpo_pl.training.update import UpdateResult

_SOME = 0.01
"""Broken rewards or failed episodes are worth a warning above this share."""


class StepLog:
    """Counts over the steps of a run.

    Args:
        reflection_words: completions with one of these count in ``completions/reflection_rate``.
    """

    def __init__(self, rewards: Sequence[Reward], reflection_words: Sequence[str]) -> None:
        self._rewards, self._reflection_words = rewards, reflection_words
        self._tokens_seen = self._skipped_in_a_row = 0
        self._warned_of_rewards = self._warned_of_episodes = False

    def metrics(
        self,
        experience: Experience,
        result: UpdateResult,
        collective: Collective,
        *,
        more: Mapping[str, float],
        lr: float,
        step_seconds: float,
    ) -> dict[str, float]:
        """Everything that is logged of a step, which counts as made from here on; all ranks call it.

        Args:
            more: what else is known of the step.

        Raises:
            ValueError: as `noted_means`.
        """
        metrics = experience_metrics(experience, self._rewards, collective, self._reflection_words)
        self._warn_of_broken_rewards(broken_share(metrics, self._rewards, experience.lengths.numel()))
        self._tokens_seen += int(experience.lengths.sum())
        metrics |= {
            **collective.ratios(result.sums),
            **more,
            "num_tokens": float(self._tokens_seen),
            "lr": lr,
            "updates/skipped": float(result.skipped),
            "step_time": step_seconds,
            **{f"time/{stage}": value for stage, value in (experience.seconds | result.seconds).items()},
        }
        for name, values in (("loss", result.losses), ("grad_norm", result.grad_norms)):
            if values:
                metrics[name] = sum(values) / len(values)
        return metrics | noted_means(experience.scored.metrics, collective, {*metrics, "step"})

    def check_divergence(self, taken: Sequence[bool], most: int) -> None:
        """Counts updates in a row that were skipped.

        Args:
            taken: whether each update of this step was taken, in order; a step without updates changes nothing.

        Raises:
            TrainingDiverged: there were ``most`` in a row.
        """
        if skipped := taken.count(False):
            rank_zero_warn(f"{skipped} update(s) skipped: loss or gradient was not finite.")
        for each in taken:
            self._skipped_in_a_row = 0 if each else self._skipped_in_a_row + 1
            if self._skipped_in_a_row >= most:
                raise TrainingDiverged(
                    f"{self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite. "
                    "Lower optimization.lr or raise its warmup_rollouts."
                )

    def warn_of_failed_episodes(self, share: float, first: str) -> None:
        """Warns if many episodes of the step have no value; ``first`` says why one has none."""
        if share > _SOME and not self._warned_of_episodes:
            self._warned_of_episodes = True
            rank_zero_warn(
                f"{share:.1%} of the episodes of this step have no value and leave the loss; the first: {first} "
                "(episodes/status/… count them)."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self._tokens_seen, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens_seen, self._skipped_in_a_row = state["tokens_seen"], state["skipped_in_a_row"]

    def _warn_of_broken_rewards(self, share: float) -> None:
        if share > _SOME and not self._warned_of_rewards:
            self._warned_of_rewards = True
            rank_zero_warn(
                f"Judging {share:.1%} of the completions of this step timed out, was killed or crashed; they score 0. "
                "Read them in completions.jsonl: the policy may have found answers that cost the judge too much."
            )
