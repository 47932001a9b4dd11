"""Collecting a step's samples: rollout and rewards, once, or repeatedly under dynamic sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.evaluation import metrics as evaluation
from grpo_pl.evaluation.held_out import Answers, grade
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rewards.base import Reward, correctness_index, needs_of
from grpo_pl.rewards.batch import ScoredBatch, join_scores, score_completions
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutEngine
from grpo_pl.rollout.groups import group_rows, join_samples, samples_to, select_groups
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.training.process_supervision import step_tensors
from grpo_pl.training.progress import ProgressCallback
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.turn_supervision import Turns, turns_of
from grpo_pl.types import Problem, PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

log = logging.getLogger(__name__)
T = TypeVar("T")


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


def gathered_values(scored: ScoredBatch, device: torch.device, collective: Collective) -> Tensor:
    """(R, B) float64 over the global batch, NaN where a reward is None."""
    return collective.gather_rows(torch.tensor(scored.values(), dtype=torch.float64, device=device).T).T


def reward_weights(rewards: Sequence[Reward], device: torch.device) -> Tensor:
    """(R,) float64."""
    return torch.tensor([reward.weight for reward in rewards], dtype=torch.float64, device=device)


def drawn_together(draw: Callable[[], T], policy: PreTrainedModel, engine: RolloutEngine, collective: Collective) -> T:
    """What ``draw`` returns on this rank.

    A rollout in which an engine's process ended is drawn again, once. The engine does that itself unless the policy is
    sharded: then only all ranks together can push its weights.
    """

    def drawn() -> T:
        engine.prepare(policy)
        return draw()

    try:
        return collective.interruptible(drawn, policy.device)
    except EngineDied:
        if not is_sharded(policy):
            raise
        log.warning("The engines of all ranks are started again, and the rollout drawn again.")
        engine.close()
    return collective.interruptible(drawn, policy.device)


def pass_rates(
    prompts: Sequence[Problem], values: Tensor, rewards: Sequence[Reward], collective: Collective
) -> dict[int, float]:
    """Share of right completions of each problem of the global batch, by id, where any could be judged.

    Args:
        prompts: this rank's.
        values: (R, P, G) over the global batch, NaN where a reward is None.
    """
    mine = torch.tensor([prompt.id for prompt in prompts], device=values.device)
    rates = evaluation.pass_rates(values[correctness_index(rewards)])
    ids = collective.gather_rows(mine).tolist()
    return {i: rate for i, rate in zip(ids, rates, strict=True) if rate is not None}


FetchPrompts = Callable[[int, int], PromptBatch]
"""This rank's prompts of (step, attempt)."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """This rank's samples of one step, and what the rewards gave them."""

    samples: Samples
    scored: ScoredBatch
    attempts: int
    """Rollouts that dynamic sampling added; 0 without it."""
    greedy: ScoredBatch | None = None
    """Of one greedy completion per prompt, if the objective's baseline asks for it."""
    steps: tuple[Tensor, Tensor] | None = None
    """Rewards of steps and the tokens they end at, both (B, K), under process supervision."""
    turns: Turns | None = None
    """What the turns of episodes got, under turn supervision."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """`pass_rates` of every group of the global batch that dynamic sampling drew, chosen or not; empty without it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per stage."""


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
    should_stop: Callable[[], bool] | None = None
    before_draw: Callable[[], None] | None = None
    """Called before the engine draws from the policy as it is, with nothing else for it to do."""
    total_steps: int = 0
    """Rollouts of the whole run, for reward functions."""

    def collect(
        self,
        policy: PreTrainedModel,
        batch: PromptBatch,
        fetch: FetchPrompts,
        drawn: tuple[Samples, Samples | None] | None = None,
    ) -> Collected:
        """Draws and scores completions of this rank's prompts, and whatever else the objective needs rewards of.

        Args:
            drawn: this rank's samples and greedy completions, where they were drawn before; greedy ones may lack.
        """
        seconds: dict[str, float] = {}
        draw = partial(self._draw, policy, seconds)
        first = draw(batch.prompts, batch.step) if drawn is None else self._scored(drawn[0], seconds)
        samples, scored, attempts, rates = self._informative_groups(draw, first, batch.step, fetch)
        greedy = steps = turns = None
        if self.algorithm.needs_greedy_baseline:
            ahead = None if drawn is None else drawn[1]
            _, greedy = (
                draw(samples.prompts, samples.step, greedy=True) if ahead is None else self._scored(ahead, seconds)
            )
        if self.algorithm.needs_step_rewards:
            steps = step_tensors(scored, samples, self.sampler.template, self.sampler.tokenizer)
        if self.algorithm.needs_turns:
            turns = turns_of(scored, samples)
        return Collected(
            samples=samples,
            scored=scored,
            greedy=greedy,
            steps=steps,
            turns=turns,
            attempts=attempts,
            rates=rates,
            seconds=seconds,
        )

    def _informative_groups(
        self,
        draw: Callable[..., tuple[Samples, ScoredBatch]],
        first: tuple[Samples, ScoredBatch],
        step: int,
        fetch: FetchPrompts,
    ) -> tuple[Samples, ScoredBatch, int, Mapping[int, float]]:
        """Samples of the ``first`` attempt; with dynamic sampling, groups of equal rewards are replaced (DAPO, section
        3.2).

        Later attempts draw other prompts. The first groups that are informative win, in the order of attempt and
        prompt over all ranks; where too few are found, groups of the first attempt fill up. Every rank ends up with
        as many groups as it began with. The last two values are `Collected.attempts` and ``rates``.
        """
        if not self.algorithm.dynamic_sampling:
            return *first, 0, {}
        pool, informative, rates = [first], list[Tensor](), dict[int, float]()
        while True:
            samples, scored = pool[-1]
            device = samples.rollout.completion_ids.device  # the one that ranks exchange tensors on
            values = gathered_values(scored, device, self.collective)
            values = values.unflatten(1, (-1, self.algorithm.group_size))  # (R, P, G) over the global batch
            weights = reward_weights(self.rewards, device)
            informative.append(self.algorithm.informative_groups(values=values, reward_weights=weights))
            rates |= pass_rates(samples.prompts, values, self.rewards, self.collective)
            enough = sum(map(int, map(torch.sum, informative))) >= len(informative[0])
            if enough or len(pool) > self.algorithm.max_resample_attempts:
                return *self._choose(pool, informative), len(pool) - 1, rates
            pool.append(draw(fetch(step, len(pool)).prompts, step, attempt=len(pool)))

    def score(self, samples: Samples) -> ScoredBatch:
        """Every reward over every completion. The rewards see texts and gold answers, never a demonstration."""
        self.report("reward", 0, len(samples.completions))
        score = partial(
            score_completions,
            self.rewards,
            completions=samples.completions,
            answers=[prompt.answer for prompt in samples.per_row],
            columns=samples.columns(needs_of(self.rewards)),
            trainer_state=partial(trainer_state, samples.step, self.total_steps, self.collective.rank),
        )
        scored = self.collective.scored(score, samples.rollout.completion_ids.device)
        self.report("reward", len(samples.completions), len(samples.completions))
        return scored

    def _draw(
        self,
        policy: PreTrainedModel,
        seconds: dict[str, float],
        prompts: Sequence[Problem],
        step: int,
        *,
        attempt: int = 0,
        greedy: bool = False,
    ) -> tuple[Samples, ScoredBatch]:
        """A group of completions for every prompt, or its one greedy completion (ReMax), with their scores."""
        rows = len(prompts) * (1 if greedy else self.algorithm.group_size)
        draw = partial(
            self.draw,
            policy,
            prompts,
            step,
            attempt=attempt,
            greedy=greedy,
            progress=self.progress(rows),
            should_stop=self.should_stop,
        )
        with stopwatch(seconds, "rollout"):
            if self.before_draw is not None:
                self.before_draw()
            samples = drawn_together(draw, policy, self.sampler.engine, self.collective)
        return self._scored(samples, seconds)

    def draw(
        self,
        policy: PreTrainedModel,
        prompts: Sequence[Problem],
        step: int,
        *,
        attempt: int = 0,
        greedy: bool = False,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Samples:
        """A group of completions for every prompt, or its one greedy completion, on this rank alone."""
        return self.sampler.sample(
            policy,
            prompts,
            group_size=1 if greedy else self.algorithm.group_size,
            sampling=replace(self.sampling, temperature=0.0) if greedy else self.sampling,
            seed=self.seed,
            split="train",
            step=step,
            attempt=attempt,
            progress=progress,
            should_stop=should_stop,
        )

    def draw_step(
        self,
        policy: PreTrainedModel,
        prompts: Sequence[Problem],
        step: int,
        greedy: bool,
        progress: ProgressFn,
        should_stop: Callable[[], bool],
    ) -> tuple[Samples, Samples | None]:
        """A step's completions on this rank, and the greedy one of each prompt if that is asked for."""
        draw = partial(self.draw, policy, prompts, step, progress=progress, should_stop=should_stop)
        samples = draw()
        return samples, draw(greedy=True) if greedy else None

    def answer(
        self, policy: PreTrainedModel, step: int, problems: Sequence[Problem], samples: int, sampling: SamplingParams
    ) -> Answers:
        """Graded completions of this rank's held-out problems. Keys do not name the step, so validations of one run
        draw with common random numbers and differ by the weights alone."""
        rows = len(problems) * samples
        draw = partial(
            self.sampler.sample,
            policy,
            problems,
            group_size=samples,
            sampling=sampling,
            seed=self.seed,
            split="val",
            progress=self.progress(rows, "validate"),
            should_stop=self.should_stop,
        )
        drawn = drawn_together(draw, policy, self.sampler.engine, self.collective)
        state = partial(trainer_state, step, self.total_steps, self.collective.rank)
        return self.collective.scored(
            lambda: grade(self.rewards, drawn, vote=samples > 1, trainer_state=state), policy.device
        )

    def progress(self, rows: int, stage: str = "rollout") -> ProgressFn:
        """Reports how many of ``rows`` completions are finished."""
        return lambda tokens, finished: self.report(stage, finished, rows, f"{tokens} tokens")

    def _scored(self, samples: Samples, seconds: dict[str, float]) -> tuple[Samples, ScoredBatch]:
        with stopwatch(seconds, "reward"):
            return samples, self.score(samples)

    def _choose(
        self, pool: Sequence[tuple[Samples, ScoredBatch]], informative: Sequence[Tensor]
    ) -> tuple[Samples, ScoredBatch]:
        """This rank's share of the chosen groups; they may have been drawn on another rank."""
        wanted = len(informative[0])
        found = [(a, g) for a, groups in enumerate(informative) for g in groups.nonzero().flatten().tolist()]
        uninformative = [(0, g) for g in (~informative[0]).nonzero().flatten().tolist()]
        chosen = sorted((found + uninformative)[:wanted])
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
