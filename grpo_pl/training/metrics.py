"""Metrics and warnings of a training step; names are TRL's, values global over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from grpo_pl import environment as environments
from grpo_pl.distributed.collective import Collective
from grpo_pl.rewards.base import Reward, Status, correctness_index, with_inner
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.experience import Experience
from grpo_pl.training.optimization import TrainingDiverged
from grpo_pl.types import FinishReason

if TYPE_CHECKING:
    from grpo_pl.training.update import UpdateResult


REFLECTION_WORDS = ("wait", "check")
"""A completion that contains one of these counts as reflecting (the "aha moment" of DeepSeek-R1)."""
_WARN_ABOVE = 0.01
"""Broken rewards or failed episodes are worth a warning above this share."""
_STEPS_WITHOUT_VALUES = 3
"""So many steps in a row in which a reward gives no completion a value are worth a warning: one may be an accident."""


class StepLog:
    """The metrics of each step, warnings that come once in a run, and the end of a run that has diverged.

    Args:
        reflection_words: completions with one of these count in ``completions/reflection_rate``.
    """

    def __init__(self, rewards: Sequence[Reward], reflection_words: Sequence[str]) -> None:
        self._rewards, self._reflection_words = rewards, reflection_words
        self._tokens_seen = self._skipped_in_a_row = 0
        self._warned_of_rewards = self._warned_of_episodes = False
        self._steps_without_values: Counter[str] = Counter()

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
            more: the metrics of callbacks and of other parts of the run.

        Raises:
            ValueError: a term of the objective has a metric of a name that is taken.
        """
        metrics = experience_metrics(experience, self._rewards, collective, self._reflection_words)
        broken = broken_share(metrics, self._rewards, experience.lengths.numel())
        if broken > _WARN_ABOVE and not self._warned_of_rewards:
            self._warned_of_rewards = True
            rank_zero_warn(
                f"Judging {broken:.1%} of the completions of this step timed out, was killed or crashed; they score 0. "
                "Read them in completions.jsonl: the policy may have found answers that cost the judge too much."
            )
        self._warn_of_rewards_without_values(metrics)
        self._tokens_seen += int(experience.lengths.sum())
        of_tokens = collective.ratios(result.sums)
        own = {
            "num_tokens": float(self._tokens_seen),
            "lr": lr,
            "updates/skipped": float(result.skipped),
            "step_time": step_seconds,
            **{f"time/{stage}": value for stage, value in (experience.seconds | result.seconds).items()},
        }
        for name, values in (("loss", result.losses), ("grad_norm", result.grad_norms)):
            if values:
                own[name] = sum(values) / len(values)
        if twice := sorted(of_tokens.keys() & {*metrics, *own}):
            raise ValueError(
                f"{twice[0]} is a metric of a term of model.algorithm.terms and logged already: name it otherwise."
            )
        metrics |= {**of_tokens, **more, **own}
        return metrics | logged_means(experience.scored.metrics, collective, {*metrics, "step"})

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

    def _warn_of_rewards_without_values(self, metrics: Mapping[str, float]) -> None:
        for reward in self._rewards:
            judged = f"rewards/{reward.name}/mean" in metrics
            self._steps_without_values[reward.name] = 0 if judged else self._steps_without_values[reward.name] + 1
            if self._steps_without_values[reward.name] == _STEPS_WITHOUT_VALUES:
                rank_zero_warn(
                    f"The reward {reward.name!r} gave no completion a value in {_STEPS_WITHOUT_VALUES} steps in a row; "
                    "it has no part in the training. Its status and detail in completions.jsonl say why."
                )

    def warn_of_failed_episodes(self, share: float, first: str) -> None:
        """Warns if many episodes of the step have no value; ``first`` says why one has none."""
        if share > _WARN_ABOVE and not self._warned_of_episodes:
            self._warned_of_episodes = True
            rank_zero_warn(
                f"{share:.1%} of the episodes of this step have no value and leave the loss; the first: {first} "
                "(episodes/status/… count them)."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self._tokens_seen, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens_seen, self._skipped_in_a_row = state["tokens_seen"], state["skipped_in_a_row"]


def experience_metrics(
    experience: Experience, rewards: Sequence[Reward], collective: Collective, reflection_words: Sequence[str]
) -> dict[str, float]:
    """Rewards, groups, lengths, statuses. A mean over nothing is left out."""
    statistics, lengths = experience.statistics, experience.lengths.double()
    groups = zip(statistics.rewards, statistics.valid, strict=True)
    spread = [row[valid].std(correction=int(valid.sum() > 1)).item() for row, valid in groups if valid.any()]
    metrics = {
        "reward": _mean(statistics.rewards[statistics.valid]),
        "reward_std": fmean(spread or [0.0]),
        "frac_reward_zero_std": 1.0 - statistics.informative.double().mean().item(),
        "samples/dropped": float((~statistics.keep).sum()),
        "samples/resample_attempts": float(experience.attempts),
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": experience.truncated.double().mean().item(),
    }
    for reward_, values in zip(rewards, experience.values, strict=True):
        metrics[f"rewards/{reward_.name}/mean"] = _mean(values[~values.isnan()])
    if (judge := correctness_index(rewards)) is not None:
        judged = experience.values[judge]  # (P, G)
        metrics["completions/correct"] = _mean((judged >= 1.0)[~judged.isnan()])
        metrics["completions/mean_length_correct"] = _mean(lengths[judged >= 1.0])
        metrics["completions/mean_length_wrong"] = _mean(lengths[judged < 1.0])
    metrics |= _thought_metrics(experience, collective)
    metrics |= _episode_metrics(experience, collective)
    metrics |= _source_metrics(experience, rewards, collective)
    metrics |= _text_metrics(experience, collective, reflection_words)
    return {name: value for name, value in metrics.items() if value == value}  # NaN: a mean over nothing


def staleness(experience: Experience, collective: Collective) -> dict[str, float]:
    """``sampling/staleness``: updates that the policy had had since a token was drawn, mean over the global batch."""
    rollout = experience.rollout
    ages = (experience.samples.step - rollout.policy_version)[rollout.action_mask]
    return collective.ratios({"sampling/staleness": (ages.sum(), ages.new_tensor(len(ages)))})


def _thought_metrics(experience: Experience, collective: Collective) -> dict[str, float]:
    """Tokens of the thoughts, their budgets, and the share that a budget ended; nothing without budgets."""
    rollout = experience.rollout
    if rollout.thoughts is None:
        return {}
    ended = rollout.lengths > rollout.action_lengths
    rows = torch.cat([rollout.thoughts[:, 0].double(), ended.unsqueeze(1).double()], dim=1)  # (B, 3)
    length, budget, closed = collective.gather_rows(rows).mean(dim=0).tolist()
    return {"thinking/mean_length": length, "thinking/mean_budget": budget, "thinking/closed_ratio": closed}


def _episode_metrics(experience: Experience, collective: Collective) -> dict[str, float]:
    """Turns, returns and ends of the episodes; nothing without an environment."""
    if experience.samples.episodes is None:
        return {}
    reasons, statuses = get_args(FinishReason), get_args(environments.Status)
    rows = [
        (
            len(episode.turns),
            sum(episode.invalid_actions),
            math.nan if episode.value is None else episode.value,
            reasons.index(episode.finish_reason),
            statuses.index(episode.status),
            1 + max((turn.segment for turn in episode.turns), default=0),
        )
        for episode in experience.samples.episodes
    ]
    mine = torch.tensor(rows, dtype=torch.float64, device=experience.keep.device)
    turns, invalid, returns, reason, status, segments = collective.gather_rows(mine).unbind(dim=1)
    ended = {name: (reason == number).double() for number, name in enumerate(reasons)}
    went_wrong = {name: (status == number).sum().item() for number, name in enumerate(statuses) if name != "ok"}
    return {
        "episodes/mean_turns": turns.mean().item(),
        **({"episodes/mean_segments": segments.mean().item()} if (segments > 1).any() else {}),
        "episodes/invalid_actions": (invalid.sum() / turns.sum()).item(),
        "episodes/return": _mean(returns[~returns.isnan()]),
        "episodes/left_out": returns.isnan().double().mean().item(),
        **{f"episodes/finish/{name}": ended[name].mean().item() for name in ("environment", "turns", "tokens")},
        **{f"episodes/status/{name}": count for name, count in went_wrong.items() if count},
    }


def _source_metrics(experience: Experience, rewards: Sequence[Reward], collective: Collective) -> dict[str, float]:
    """The main numbers for each part of a mixture, as ``sources/<name>/…``; nothing where there are no parts."""
    mine = [prompt.source for prompt in experience.samples.prompts]
    if not all(mine):
        return {}
    sources = [source for part in collective.gather_objects(mine) for source in part]  # P, in the order of the batch
    statistics, metrics = experience.statistics, {}
    for name in sorted(set(sources)):
        rows = torch.tensor([source == name for source in sources], device=statistics.rewards.device)
        metrics[f"sources/{name}/reward"] = _mean(statistics.rewards[rows][statistics.valid[rows]])
        metrics[f"sources/{name}/frac_reward_zero_std"] = 1.0 - _mean(statistics.informative[rows])
        metrics[f"sources/{name}/mean_length"] = _mean(experience.lengths[rows])
        for reward, values in zip(rewards, experience.values[:, rows], strict=True):
            metrics[f"sources/{name}/rewards/{reward.name}/mean"] = _mean(values[~values.isnan()])
    return metrics


def _text_metrics(experience: Experience, collective: Collective, words: Sequence[str]) -> dict[str, float]:
    """Counts over texts, which live on their own rank only, summed over ranks in one exchange."""
    texts = [text.lower() for text in experience.samples.completions]
    reflecting = float(sum(any(word in text for word in words) for text in texts))
    counts = {
        f"rewards/{name}/status/{status}": float(statuses[status])
        for name, statuses in experience.scored.status_counts().items()
        for status in get_args(Status)
    }
    packed = torch.tensor([*counts.values(), reflecting, len(texts)], device=experience.keep.device)
    *totals, reflecting, rows = collective.sum(packed).tolist()
    seen = {name: total for name, total in zip(counts, totals, strict=True) if total}
    return {**seen, "completions/reflection_rate": reflecting / rows}


def logged_means(
    noted: Mapping[str, Sequence[float]], collective: Collective, taken: Collection[str]
) -> dict[str, float]:
    """Metrics that reward functions logged by ``log_metric``: means over their calls on all ranks, sorted by name.

    Args:
        taken: names that are logged already.
    """
    values: dict[str, list[float]] = {}
    for some in collective.gather_objects(dict(noted)):
        for name, part in some.items():
            values.setdefault(name, []).extend(part)
    ours = next((name for name in values if name in taken), None)
    if ours is not None:
        raise ValueError(f"log_metric({ours!r}): a metric of that name is logged already, choose another.")
    return {name: fmean(part) for name, part in sorted(values.items())}


def without_value(samples: Samples, collective: Collective) -> tuple[float, str]:
    """The share of all ranks' episodes that have no value, and the detail of the first; an error if none has one."""
    episodes = samples.episodes or ()
    details = [
        episode.detail or "its prompt leaves no room for an action" for episode in episodes if episode.value is None
    ]
    everyone = collective.gather_objects((len(episodes), details))
    total, told = sum(count for count, _ in everyone), [detail for _, part in everyone for detail in part]
    if total and len(told) == total:
        raise ValueError(
            f"none of the {total} episodes of rollout {samples.step + 1} has a value; the first: {told[0]}"
        )
    return len(told) / max(1, total), next(iter(told), "")


def broken_share(metrics: Mapping[str, float], rewards: Sequence[Reward], completions: int) -> float:
    """Largest share, over the rewards, of completions whose judging timed out, was killed or crashed.

    What an `EnvironmentReward` tells so is a step that ended an episode by the policy's own fault: nothing is broken.
    """
    from grpo_pl.rewards.environment import EnvironmentReward

    judging = [r for r in rewards if not any(isinstance(part, EnvironmentReward) for part in with_inner([r]))]
    shares = (
        sum(metrics.get(f"rewards/{reward.name}/status/{status}", 0.0) for status in ("timeout", "killed", "crashed"))
        / completions
        for reward in judging
    )
    return max(shares, default=0.0)


def _mean(values: Tensor) -> float:
    return values.double().mean().item()  # NaN where empty
