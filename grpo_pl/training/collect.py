"""Collecting a step's samples: rollout and rewards, once, or repeatedly under dynamic sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import gathered
from grpo_pl.evaluation import metrics as evaluation
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.base import Turns
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rewards.base import Reward, correctness_index, needs_of
from grpo_pl.rewards.batch import ScoredBatch, join_scores, score_completions
from grpo_pl.rollout.engine import EngineDied, ProgressFn
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.training.credit import step_tensors, turns_of
from grpo_pl.training.progress import ProgressCallback
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.types import Problem, PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState

log = logging.getLogger(__name__)
T = TypeVar("T")


def trainer_state(step: int, steps: int, rank: int) -> TrainerState:
    """The ``trainer_state`` argument of reward functions, as in TRL; steps are rollouts, and the run is one epoch."""
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


def pass_rates(
    prompts: Sequence[Problem], values: Tensor, rewards: Sequence[Reward], collective: Collective
) -> dict[int, float]:
    """Share of right completions of each problem of the global batch, by id, where any could be judged; nothing
    without a correctness reward.

    Args:
        prompts: this rank's.
        values: (R, P, G) over the global batch, NaN where a reward is None.
    """
    mine = torch.tensor([prompt.id for prompt in prompts], device=values.device)
    judge = correctness_index(rewards)
    if judge is None:
        return {}
    rates = evaluation.pass_rates(values[judge])
    ids = collective.gather_rows(mine).tolist()
    return {i: rate for i, rate in zip(ids, rates, strict=True) if rate is not None}


FetchPrompts = Callable[[int, int], PromptBatch]
"""This rank's prompts of (step, attempt)."""
Draws = tuple[Samples, Samples | None]
"""A step's completions, and the greedy one of each prompt where they were drawn with them."""


class DrawRequest(NamedTuple, Generic[T]):
    """Work for the engine of this rank, done at once or in a thread beside the updates."""

    draw: Callable[..., T]
    """Called with the policy, ``progress`` and ``should_stop``."""
    rows: int
    """Completions that progress is counted in."""
    stage: str = "rollout"


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
    """Rewards of steps and the tokens they end at, both (B, K), where the objective needs them."""
    turns: Turns | None = None
    """Rewards of the turns of episodes, where the objective needs them."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """`pass_rates` of every group of the global batch that was drawn, chosen by dynamic sampling or not; without it
    they are found with the ``Experience``."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per stage."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Prompts → rollout → reward on all ranks at once, by two verbs: `draw` and `score`."""

    sampler: CompletionSampler
    rewards: Sequence[Reward]
    algorithm: GRPOAlgorithm
    sampling: SamplingParams
    seed: int
    collective: Collective
    report: ProgressCallback
    should_stop: Callable[[], bool] | None = None
    before_draw: Callable[[], None] | None = None
    """Called before the engine draws from the policy as it is; waits until the engine has nothing else to do."""
    total_steps: int = 0
    """Rollouts of the whole run, for reward functions."""

    def request(
        self, prompts: Sequence[Problem], step: int, *, attempt: int = 0, greedy: bool = False
    ) -> DrawRequest[Samples]:
        """A group of completions for every prompt, or one greedy completion for each (ReMax)."""
        return DrawRequest(
            partial(
                self.sampler.sample,
                prompts=prompts,
                group_size=1 if greedy else self.algorithm.group_size,
                sampling=replace(self.sampling, temperature=0.0) if greedy else self.sampling,
                seed=self.seed,
                split="train",
                step=step,
                attempt=attempt,
            ),
            rows=len(prompts) * (1 if greedy else self.algorithm.group_size),
        )

    def draw(self, policy: PreTrainedModel, request: DrawRequest[T]) -> T:
        """Draws a request on this rank; all ranks call it together.

        A rollout in which an engine's process ended is drawn again, once. The engine does that itself unless the policy
        is sharded: then only all ranks together can push its weights.

        An engine that reads the live weights of a sharded policy finds them whole; they are freed behind the draw, so
        that rewards and scores are computed in the memory that they take.
        """
        engine = self.sampler.engine
        if self.before_draw is not None:
            self.before_draw()

        def drawn() -> T:
            engine.prepare(policy)
            return request.draw(
                policy, progress=self.progress(request.rows, request.stage), should_stop=self.should_stop
            )

        try:
            with gathered(policy) if engine.weights_version is None else nullcontext():
                return self.collective.interruptible(drawn, policy.device)
        except EngineDied:
            if not is_sharded(policy):
                raise
            log.warning("The engines of all ranks are started again, and the rollout drawn again.")
            engine.close()
        return self.collective.interruptible(drawn, policy.device)

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

    def collect(
        self, policy: PreTrainedModel, drawn: Draws, fetch: FetchPrompts, seconds: dict[str, float]
    ) -> Collected:
        """Scores a step's rollout, and draws and scores what else the objective needs: groups in place of those of
        equal rewards (dynamic sampling), a greedy completion per prompt (ReMax) if ``drawn`` has none.

        Args:
            drawn: this rank's samples and greedy completions.
            fetch: the prompts of further attempts.
            seconds: of the step so far.
        """
        samples, greedy_samples = drawn
        with stopwatch(seconds, "reward"):
            scored = self.score(samples)
        attempts, rates = 0, dict[int, float]()
        if self.algorithm.dynamic_sampling:
            samples, scored, attempts, rates = self._resampled(policy, (samples, scored), fetch, seconds)
        greedy = None
        needs = self.algorithm.needs
        if needs.greedy_values:
            if greedy_samples is None:
                with stopwatch(seconds, "rollout"):
                    greedy_samples = self.draw(policy, self.request(samples.prompts, samples.step, greedy=True))
            with stopwatch(seconds, "reward"):
                greedy = self.score(greedy_samples)
        steps = turns = None
        if needs.step_rewards:
            steps = step_tensors(scored, samples, self.sampler.template, self.sampler.tokenizer)
        if needs.turns:
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

    def progress(self, rows: int, stage: str = "rollout") -> ProgressFn:
        """Reports how many of ``rows`` completions are finished."""
        return lambda tokens, finished: self.report(stage, finished, rows, f"{tokens} tokens")

    def _resampled(
        self,
        policy: PreTrainedModel,
        first: tuple[Samples, ScoredBatch],
        fetch: FetchPrompts,
        seconds: dict[str, float],
    ) -> tuple[Samples, ScoredBatch, int, dict[int, float]]:
        """Dynamic sampling (DAPO, section 3.2): groups of equal rewards are replaced by groups of other prompts.

        The first informative groups win, in the order of attempt and prompt over all ranks; where too few are found,
        groups of the first attempt fill up. Every rank ends up with as many groups as it began with. The last two
        values are `Collected.attempts` and ``rates``.
        """
        pool, informative, rates = [first], list[Tensor](), dict[int, float]()
        step, device = first[0].step, first[0].rollout.completion_ids.device  # the one that ranks exchange tensors on
        weights = reward_weights(self.rewards, device)
        while True:
            samples, scored = pool[-1]
            values = gathered_values(scored, device, self.collective)
            values = values.unflatten(1, (-1, self.algorithm.group_size))  # (R, P, G) over the global batch
            informative.append(self.algorithm.informative_groups(values=values, reward_weights=weights))
            rates |= pass_rates(samples.prompts, values, self.rewards, self.collective)
            enough = sum(map(int, map(torch.sum, informative))) >= len(informative[0])
            if enough or len(pool) > self.algorithm.max_resample_attempts:
                return *self._choose(pool, informative), len(pool) - 1, rates
            prompts = fetch(step, len(pool)).prompts
            with stopwatch(seconds, "rollout"):
                more = self.draw(policy, self.request(prompts, step, attempt=len(pool)))
            with stopwatch(seconds, "reward"):
                pool.append((more, self.score(more)))

    def _choose(
        self, pool: Sequence[tuple[Samples, ScoredBatch]], informative: Sequence[Tensor]
    ) -> tuple[Samples, ScoredBatch]:
        """This rank's share of the chosen groups; they may have been drawn on another rank."""
        from grpo_pl.rollout.groups import group_rows, join_samples, samples_to, select_groups

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
