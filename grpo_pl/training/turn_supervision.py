"""Turn supervision: what the rewards give each turn of an episode, and what does not go together with episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.environments.base import Environment
from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards.base import Reward, Score, held_by
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rewards.environment import EnvironmentReward
from grpo_pl.rollout.sampler import Samples


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of B episodes, K at most; see ``GRPOAlgorithm.turn_advantages``."""

    rewards: Tensor  # (B, K) float64, weighted
    present: Tensor  # (B, K) bool
    invalid_actions: Tensor  # (B, K) bool
    states: Sequence[Sequence[str]]  # B


def turns_of(scored: ScoredBatch, samples: Samples) -> Turns:
    """What each turn gets: the turns of a reward that scores them, and with the last turn every other reward.

    Raises:
        ValueError: a reward scores another number of turns than the episode has.
    """
    device = samples.rollout.completion_ids.device
    assert samples.episodes is not None, "supervision turn without an environment is refused before"
    counts = [len(episode.turns) for episode in samples.episodes]
    shape = len(counts), max(1, *counts)
    rewards = torch.zeros(shape, dtype=torch.float64)
    present, invalid = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    weights = [reward.weight for reward in scored.rewards]
    for row, (count, episode) in enumerate(zip(counts, samples.episodes, strict=True)):
        present[row, :count] = True
        invalid[row, :count] = torch.tensor(episode.invalid_actions, dtype=torch.bool)
        parts = [
            _parts(reward, scores[row], count) for reward, scores in zip(scored.rewards, scored.scores, strict=True)
        ]
        for turn in range(count):
            rewards[row, turn] = weighted_sum([part[turn] for part in parts], weights)
    return Turns(
        rewards=rewards.to(device),
        present=present.to(device),
        invalid_actions=invalid.to(device),
        states=[episode.states for episode in samples.episodes],
    )


def _parts(reward: Reward, score: Score, count: int) -> Sequence[float]:
    """What a reward adds to each of the ``count`` turns; nothing where it has no value."""
    if score.value is None:
        return [0.0] * count
    if score.turns is None:
        return [0.0] * (count - 1) + [score.value]
    if len(score.turns) != count:
        raise ValueError(f"reward {reward.name!r} scored {len(score.turns)} turns of an episode that has {count}.")
    return score.turns


def check_episodes(environment: Environment | None, algorithm: GRPOAlgorithm, rewards: Sequence[Reward]) -> None:
    """Refuses what needs an environment without one, and the other way round.

    Raises:
        ValueError: what to change.
    """
    if environment is not None:
        if algorithm.needs_step_rewards:
            raise ValueError(
                "algorithm.supervision is process, whose steps are parts of one text, but with model.environment a "
                "completion has many: set supervision to turn or outcome."
            )
        if algorithm.needs_greedy_baseline and algorithm.dynamic_sampling:
            raise ValueError(
                "algorithm.baseline greedy with dynamic_sampling would play the greedy episode in another world than "
                "the group that it is compared with: set dynamic_sampling to false."
            )
        return
    if algorithm.needs_turns:
        raise ValueError(
            "algorithm.supervision is turn, but there is no model.environment whose turns could be credited: name one, "
            "or set supervision: outcome."
        )
    reward = next((reward for reward in _with_inner(rewards) if isinstance(reward, EnvironmentReward)), None)
    if reward is not None:
        raise ValueError(f"reward {reward.name!r} pays what an environment gave, but there is no model.environment.")


def _with_inner(rewards: Iterable[Reward]) -> Iterator[Reward]:
    for reward in rewards:
        yield reward
        yield from _with_inner(held_by(reward))


def without_value(samples: Samples, collective: Collective) -> tuple[float, str]:
    """The share of the episodes of all ranks that have no value, and what the first of them says about it.

    Raises:
        ValueError: none has one, so that there is nothing to learn from.
    """
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
