"""Collecting a step's samples: rollout and rewards, once, or again and again until the batch is worth learning from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards.base import Reward, needs_of
from grpo_pl.rewards.batch import ScoredBatch, join_scores, score_completions
from grpo_pl.rollout.groups import group_rows, join_samples, samples_to, select_groups
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.types import Problem, PromptBatch, SamplingParams, Split

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState


class ProgressCallback(Protocol):
    """Tells whoever watches how far the current stage of a step is."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


def trainer_state(step: int, steps: int, rank: int) -> TrainerState:
    """What reward functions get as TRL hands it to them; steps are rollouts, and the run is one epoch."""
    from transformers import TrainerState

    return TrainerState(
        global_step=step,
        max_steps=steps,
        epoch=step / steps if steps else 0.0,
        num_train_epochs=1,
        is_local_process_zero=rank == 0,
        is_world_process_zero=rank == 0,
    )


FetchPrompts = Callable[[int, int], PromptBatch]
"""This rank's prompts of (step, attempt)."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """This rank's samples and scores of one step."""

    samples: Samples
    scored: ScoredBatch
    attempts: int
    """Rollouts that dynamic sampling added; 0 without it."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Prompts → rollout → reward, on every rank at once."""

    sampler: CompletionSampler
    rewards: Sequence[Reward]
    algorithm: GRPOAlgorithm
    sampling: SamplingParams
    seed: int
    collective: Collective
    report: ProgressCallback
    steps: int = 0
    """Rollouts of the whole run."""
    should_stop: Callable[[], bool] | None = None

    def collect(
        self, policy: PreTrainedModel, batch: PromptBatch, fetch: FetchPrompts, seconds: dict[str, float]
    ) -> Collected:
        """Samples of ``batch``; with dynamic sampling, groups of equal rewards are replaced (DAPO, section 3.2).

        Later attempts draw other prompts. The first groups that are informative win, in the order of attempt and
        prompt over all ranks; where too few are found, groups of the first attempt fill up. Every rank ends up with
        as many groups as it began with.
        """
        first = self._draw(policy, batch, 0, seconds)
        if not self.algorithm.dynamic_sampling:
            return Collected(samples=first[0], scored=first[1], attempts=0)
        pool = [first]
        informative = [self._informative(first[1])]
        wanted, attempts = len(informative[0]), 0
        while sum(int(found.sum()) for found in informative) < wanted:
            if attempts == self.algorithm.max_resample_attempts:
                break
            attempts += 1
            pool.append(self._draw(policy, fetch(batch.step, attempts), attempts, seconds))
            informative.append(self._informative(pool[-1][1]))
        samples, scored = self._choose(pool, informative)
        return Collected(samples=samples, scored=scored, attempts=attempts)

    @property
    def reward_weights(self) -> Tensor:
        """(R,) float64."""
        return torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float64)

    def greedy(self, policy: PreTrainedModel, samples: Samples, seconds: dict[str, float]) -> ScoredBatch:
        """Scores of one greedy completion per prompt (ReMax's baseline)."""
        with stopwatch(seconds, "rollout"):
            drawn = self._sample(policy, samples.prompts, "greedy", samples.step, 0)
        with stopwatch(seconds, "reward"):
            return self.score(drawn)

    def score(self, samples: Samples) -> ScoredBatch:
        """Every reward over every completion. The rewards see texts and gold answers, never a demonstration."""
        self.report("reward", 0, len(samples.completions))
        score = partial(
            score_completions,
            self.rewards,
            completions=samples.completions,
            answers=[prompt.answer for prompt in samples.per_row],
            columns=samples.columns(needs_of(self.rewards)),
            trainer_state=partial(trainer_state, samples.step, self.steps, self.collective.rank),
        )
        scored = self.collective.scored(score, samples.rollout.completion_ids.device)
        self.report("reward", len(samples.completions), len(samples.completions))
        return scored

    def _draw(
        self, policy: PreTrainedModel, batch: PromptBatch, attempt: int, seconds: dict[str, float]
    ) -> tuple[Samples, ScoredBatch]:
        with stopwatch(seconds, "rollout"):
            samples = self._sample(policy, batch.prompts, "train", batch.step, attempt)
        with stopwatch(seconds, "reward"):
            return samples, self.score(samples)

    def _sample(
        self, policy: PreTrainedModel, prompts: Sequence[Problem], split: Split, step: int, attempt: int
    ) -> Samples:
        greedy = split == "greedy"
        group_size = 1 if greedy else self.algorithm.group_size
        rows = len(prompts) * group_size
        draw = partial(
            self.sampler.sample,
            policy,
            prompts,
            group_size=group_size,
            sampling=replace(self.sampling, temperature=0.0) if greedy else self.sampling,
            seed=self.seed,
            split=split,
            step=step,
            attempt=attempt,
            progress=lambda tokens, finished: self.report("rollout", finished, rows, f"{tokens} tokens"),
            should_stop=self.should_stop,
        )
        return self.collective.interruptible(draw, policy.device)

    def _informative(self, scored: ScoredBatch) -> Tensor:
        """(P,) bool over the global batch."""
        values = self.collective.gather_rows(torch.tensor(scored.values(), dtype=torch.float64).T)  # (B, R)
        return self.algorithm.informative_groups(
            values=values.T.reshape(len(self.rewards), -1, self.algorithm.group_size),
            reward_weights=self.reward_weights,
        )

    def _choose(
        self, pool: Sequence[tuple[Samples, ScoredBatch]], informative: Sequence[Tensor]
    ) -> tuple[Samples, ScoredBatch]:
        """This rank's share of the chosen groups; they may have been drawn on another rank."""
        wanted = len(informative[0])
        found = [(a, g) for a, groups in enumerate(informative) for g in groups.nonzero().flatten().tolist()]
        dull = [(0, g) for g in (~informative[0]).nonzero().flatten().tolist()]
        chosen = sorted((found + dull)[:wanted])
        share = wanted // self.collective.world
        mine = chosen[self.collective.rank * share : (self.collective.rank + 1) * share]
        # each rank offers the chosen groups that it drew; the global number of a group tells its owner
        offered: dict[tuple[int, int], tuple[Samples, ScoredBatch]] = {}
        for attempt, group in chosen:
            owner, local = divmod(group, share)
            if owner == self.collective.rank:
                samples, scored = pool[attempt]
                rows = group_rows([local], self.algorithm.group_size)
                offered[attempt, group] = (
                    samples_to(select_groups(samples, [local]), torch.device("cpu")),
                    replace(scored.select(rows), rewards=[], metrics={}),  # rewards need not survive pickle
                )
        everyone = {key: value for part in self.collective.gather_objects(offered) for key, value in part.items()}
        parts = [everyone[key] for key in mine]
        pad_token_id = int(self.sampler.tokenizer.pad_token_id)
        joined = join_samples([samples for samples, _ in parts], pad_token_id)
        device = pool[0][0].rollout.completion_ids.device
        noted: dict[str, list[float]] = {}
        for _, scored in pool:
            for name, values in scored.metrics.items():
                noted.setdefault(name, []).extend(values)
        return samples_to(joined, device), join_scores(self.rewards, [scores for _, scores in parts], noted)
