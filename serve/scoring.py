"""The objective by which the rewards of a group become advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_pl.config.objects import build
from grpo_pl.config.presets import preset_name
from grpo_pl.config.terms import OBJECTIVE
from grpo_pl.functional.advantages import masked_mean_std
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards.trust import refuse_own_classes

_BASELINES = {"group_mean": "reward − mean", "leave_one_out": "reward − mean of the others", "none": "reward"}
_SCALES = {"group_std": "({}) / (std + {:g})", "group_mean": "({}) / mean", "none": "{}"}
_OWN = "an objective of its own"


@dataclass(frozen=True, kw_only=True)
class GroupObjective:
    """The objective by which the rewards of one group become advantages."""

    trained: str
    """Name of the objective of the training; "" where an export does not say."""
    algorithm: GRPOAlgorithm
    """That objective, or GRPO where it needs more than the rewards of one group."""

    @property
    def name(self) -> str:
        return preset_name(self.algorithm.values()) or _OWN

    @property
    def formula(self) -> str:
        """The advantage in words; says where it is not that of the training."""
        a = self.algorithm
        formula = _SCALES[str(a.scale)].format(_BASELINES[str(a.baseline)], a.std_eps)
        if a.samples == "correct":
            formula += ", of right samples only"
        if self.trained not in ("", self.name):
            formula += f"; trained with {self.trained}, whose advantages cannot be shown for one group"
        return formula

    def advantages(self, rewards: Sequence[float | None], correct: Sequence[bool | None]) -> list[float | None]:
        """The advantage of each sample; None where the reward is None."""
        padded = [*rewards, *([None] if len(rewards) == 1 else [])]  # a group is two or more
        values = torch.tensor([[[math.nan if reward is None else reward for reward in padded]]], dtype=torch.float64)
        right = torch.tensor([[verdict is True for verdict in (*correct, False)][: len(padded)]])
        found = replace(self.algorithm, group_size=len(padded)).advantages(
            values=values,
            reward_weights=torch.ones(1, dtype=torch.float64),
            lengths=torch.ones(1, len(padded), dtype=torch.long),
            truncated=torch.zeros(1, len(padded), dtype=torch.bool),
            correct=right,
        )
        known = zip(rewards, found.advantages[0].tolist(), strict=False)
        return [None if reward is None else advantage for reward, advantage in known]

    def group(self, scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Scored items with their advantages, and statistics of the group."""
        rewards = [item["value"] for item in scored]
        values = torch.tensor([[math.nan if reward is None else reward for reward in rewards]], dtype=torch.float64)
        valid = ~values.isnan()
        mean, std = masked_mean_std(values.nan_to_num(0.0), valid, dim=1, ddof=self.algorithm.std_ddof)
        advantages = self.advantages(rewards, [item["correct"] for item in scored])
        return {
            "items": [{**item, "advantage": each} for item, each in zip(scored, advantages, strict=True)],
            "group": {
                "mean": mean.item(),
                "std": std.item(),
                "scored": int(valid.sum()),
                "objective": self.name,
                "formula": self.formula,
            },
        }


def group_objective(given: Mapping[str, Any]) -> GroupObjective:
    """The objective of an export or a run.

    Args:
        given: its fields; nothing, or parts that only the training could build, mean GRPO.
    """
    try:
        refuse_own_classes({"algorithm": given})
        trained = build(GRPOAlgorithm, given, OBJECTIVE) if given else None
    except ValueError:  # of another version, or with parts that only the training could build
        trained = None
    if trained is None:
        return GroupObjective(trained=_OWN if given else "", algorithm=GRPOAlgorithm())
    needs = trained.needs
    enough = (
        trained.baseline in _BASELINES
        and trained.scale in _SCALES
        and not (needs.step_rewards or needs.turns or (needs.teacher and not needs.teacher.whole))
        and trained.overlong_buffer == 0
        and not trained.kl_in_reward
        and trained.reward_aggregation == "sum_then_normalize"
    )
    name = preset_name(trained.values()) or _OWN
    return GroupObjective(trained=name, algorithm=trained if enough else GRPOAlgorithm())
