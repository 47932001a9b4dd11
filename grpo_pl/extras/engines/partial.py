"""Partial rollouts: long completions go on in the next step, and their groups wait until they are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.environment import Environment
from grpo_pl.extras.engines.partial_completions import (
    PartialCompletion,
    PartialGroup,
    PartialSampler,
    RowIndex,
    extended,
    new_groups,
)
from grpo_pl.extras.engines.plain_samples import check_plain, plain_problem, problem_of
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Collected, Collector, DrawRequest
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import staleness
from grpo_pl.training.partial_rollouts import PartialRollouts
from grpo_pl.training.source import RolloutSource
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.weight_sync import ROWS
from grpo_pl.types import Problem, PromptBatch, SamplingParams

Grow = Callable[[list[PartialGroup]], dict[RowIndex, PartialCompletion]]
"""Draws more of this rank's groups, as `PartialSampler.grow`; all ranks call it, some perhaps with no group."""


@dataclass(kw_only=True, eq=False)
class PartialRolloutBuffer(RolloutSource):
    """The groups that are open between two steps, the oldest first, the same on every rank."""

    stale: ClassVar[bool] = True
    entry: ClassVar[str] = "carried"
    settings: PartialRollouts
    group_size: int
    longest: int
    """Most tokens of a completion."""
    groups: list[PartialGroup] = field(default_factory=list)
    opened: int = 0
    """Steps whose prompts have been asked so far."""
    _next: tuple[list[PartialGroup], int] | None = None

    def advance(
        self,
        step: int,
        steps: int,
        *,
        wanted: int,
        prompts_of: Callable[[int], Sequence[Problem]],
        grow: Grow,
        collective: Collective,
        device: torch.device | None = None,
    ) -> tuple[list[PartialGroup], list[PartialGroup]]:
        """Lets every open completion grow, until enough groups are whole; those left are kept once `commit` is called.

        Args:
            step: the rollout step, from 0.
            steps: rollouts of the whole run.
            wanted: groups of a step over all ranks.
            prompts_of: this rank's prompts of a step.
            device: on which ranks exchange numbers.

        Returns:
            This rank's groups to train on, and those of which something was drawn here and now.
        """
        groups, opened = list(self.groups), max(self.opened, step)
        while opened < min(step + self.settings.steps_in_flight, steps) or len(groups) < wanted:
            prompts = prompts_of(opened)
            collective.interruptible(partial(check_plain, prompts), device or torch.device("cpu"))
            mine = new_groups(prompts, step=opened, attempt=0, group_size=self.group_size)
            groups += [group for part in collective.gather_objects(mine) for group in part]
            opened += 1
        drawn: set[int] = set()
        growing = True
        while growing:
            open_ = [i for i, group in enumerate(groups) if not group.whole]
            here = open_[collective.rank :: collective.world]
            drawn.update(here)
            parts = {(here[i], row): part for (i, row), part in grow([groups[i] for i in here]).items()}
            everything = {place: part for parts in collective.gather_objects(parts) for place, part in parts.items()}
            groups = extended(groups, everything)
            growing = sum(group.whole for group in groups) < wanted
        chosen = [i for i, group in enumerate(groups) if group.whole][:wanted]
        self._next = [group for i, group in enumerate(groups) if i not in set(chosen)], opened
        share = wanted // collective.world
        mine = [groups[i] for i in chosen[collective.rank * share : (collective.rank + 1) * share]]
        return mine, [groups[i] for i in sorted(drawn)]

    def check(
        self, engine: RolloutEngine, algorithm: GRPOAlgorithm, sampling: SamplingParams, environment: Environment | None
    ) -> None:
        others = {
            "model.environment": environment is not None,
            "model.algorithm.dynamic_sampling": algorithm.dynamic_sampling,
            "model.sampling.thinking_budget": sampling.thinking_budget is not None,
            "model.sampling.sampling_mask": sampling.sampling_mask,
            "top_logprobs of model.algorithm.terms": algorithm.needs.top_logprobs > 0,
        }
        for name, there in others.items():
            if there:
                raise ValueError(f"model.partial_rollouts does not go with {name}: leave out one of the two.")

    def check_prompts(self, prompts: Sequence[Problem]) -> None:
        check_plain(prompts)

    def describe(self, algorithm: GRPOAlgorithm, engine: RolloutEngine) -> str:
        return f"completions over several steps, corrected by {algorithm.correction}; "

    def take(self, batch: PromptBatch, collector: Collector) -> Collected:
        """Takes this rank's groups for the update of a step, as `advance` finds them; all ranks call it.

        Raises:
            OutOfSync: what was drawn for it was not drawn from the policy as it is.
            ValueError, RolloutInterrupted: as `advance` and `PartialSampler.grow`.
        """
        policy, data, step, seconds = self.run.policy, self.run.data, batch.step, dict[str, float]()
        sampler = PartialSampler(
            sampler=collector.sampler,
            sampling=collector.sampling,
            seed=collector.seed,
            part=self.settings.part_length,
        )

        def grow(groups: list[PartialGroup]) -> dict[RowIndex, PartialCompletion]:
            rows = sum(len(group.completions) for group in groups)
            return collector.draw(policy, DrawRequest(partial(sampler.grow, groups=groups), rows))

        with stopwatch(seconds, "rollout"):
            mine, grown = self.advance(
                step,
                data.steps,
                wanted=data.prompt_count,
                prompts_of=lambda step: data.prompts(step).prompts,
                grow=grow,
                collective=collector.collective,
                device=policy.device,
            )
        whole = sampler.whole(mine, step, policy.device)
        engine, temperature = collector.sampler.engine, collector.sampling.temperature
        if engine.weights_version is not None:
            sync = self.run.sync
            newest = _newest(sampler, grown, whole, sync.updates)
            sync.check(policy, newest, seconds, engine, temperature, collector.collective, newest_only=True)
        return collector.collect(policy, (whole, None), data.prompts, seconds)

    def metrics(self, experience: Experience) -> dict[str, float]:
        """Age of the tokens, and completions of which the step just made has left something to draw."""
        groups = self.groups if self._next is None else self._next[0]
        waiting = sum(row.finish_reason is None for group in groups for row in group.completions)
        return {**staleness(experience, self.run.collector.collective), "rollout/carried_completions": float(waiting)}

    def commit(self, step: int) -> None:
        """The step is made: what it left waits for the next one."""
        if self._next is not None:
            (self.groups, self.opened), self._next = self._next, None

    def state_dict(self) -> dict[str, Any]:
        groups = [
            {
                "prompt": plain_problem(group.prompt),
                "step": group.step,
                "attempt": group.attempt,
                "completions": [dict(vars(row)) for row in group.completions],
            }
            for group in self.groups
        ]
        return {self.entry: {"groups": groups, "opened": self.opened}}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; completions that are longer than allowed by now end there."""
        super().load_state_dict(checkpoint)
        state = checkpoint.get(self.entry) or {"groups": [], "opened": 0}
        groups = []
        for group in state["groups"]:
            rows = [PartialCompletion(**row) for row in group["completions"]]
            if len(rows) != self.group_size:
                raise ValueError(
                    f"the checkpoint carries groups of {len(rows)} completions that are not finished, and "
                    f"model.algorithm.group_size is {self.group_size}: resume with the former, or begin a run of "
                    "another --name."
                )
            ended = (row.finish_reason is not None or len(row.tokens) < self.longest for row in rows)
            cut = (row if whole else row.first(self.longest, "length") for row, whole in zip(rows, ended, strict=True))
            prompt = problem_of(group["prompt"])
            groups.append(
                PartialGroup(prompt=prompt, step=group["step"], attempt=group["attempt"], completions=tuple(cut))
            )
        self.groups, self.opened = groups, state["opened"]


def _newest(sampler: PartialSampler, groups: Sequence[PartialGroup], otherwise: Samples, updates: int) -> Samples:
    """Some completions with tokens that the policy drew after so many updates, whether their groups are whole or not;
    ``otherwise`` where none has."""
    rows = [(group.prompt, row) for group in groups for row in group.completions if updates in row.versions]
    some = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    if not some:
        return otherwise
    return replace(otherwise, rollout=sampler.rollout(some, 1, otherwise.rollout.completion_ids.device))
