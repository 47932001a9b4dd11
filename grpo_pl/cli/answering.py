"""``Answerer``, for ``predict``, ``filter`` and ``evaluate``: a policy in memory and its completions with rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpo_pl.config.objects import build, build_environment, build_rewards
from grpo_pl.rewards.base import Reward, needs_of
from grpo_pl.rewards.batch import ScoredBatch, score_completions
from grpo_pl.training.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.data.sources import PromptSource
    from grpo_pl.policy.template import Fits
    from grpo_pl.policy.trained import ServedModel
    from grpo_pl.rollout.sampler import CompletionSampler, Samples
    from grpo_pl.types import Problem, SamplingParams

log = logging.getLogger(__name__)
DRAW = 32
"""Training prompts asked of the source at a time."""
FRUITLESS = 50
"""After so many draws without a new problem, the source counts as exhausted."""


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """A policy in memory, how its completions are drawn, and the rewards that judge them."""

    sampler: CompletionSampler
    model: PreTrainedModel
    sampling: SamplingParams
    rewards: Sequence[Reward]
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Inside, the model computes as in its training."""

    def sample(self, problems: Sequence[Problem], *, samples: int, seed: int) -> Samples:
        """Completions of the problems, ``samples`` of each."""
        with self.computing():
            return self.sampler.sample(
                self.model, problems, group_size=samples, sampling=self.sampling, seed=seed, split="predict"
            )

    def too_long(self, problems: Iterable[Problem], total: int) -> set[int]:
        """Ids of the problems that leave no room for a completion; prints how many."""
        from grpo_pl.policy.dialogue import reading_prompts
        from grpo_pl.policy.loading import context_length
        from grpo_pl.policy.template import Fits

        context, sampler = context_length(self.model.config), self.sampler
        if context is None:
            return set()
        dialogue = sampler.dialogue  # without tools, where there is no environment, it encodes as the template does
        if sampler.pool is None:
            length, reading = self.sampling.max_completion_length, reading_prompts(dialogue)
            fits = Fits(dialogue.prompt_ids, context=context, length=length, encode_all=reading)
        else:
            fits = sampler.episodes.fits(dialogue, sampler.pool.environment, context)
        return leave_no_room(problems, total, fits, print)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context manager: rewards and environments are closed at its end."""
        with ExitStack() as stack:
            for reward in self.rewards:
                stack.enter_context(closing(reward))
            if self.sampler.pool is not None:
                stack.enter_context(self.sampler.pool)
            yield

    def judge(self, drawn: Samples) -> ScoredBatch:
        """The scores of completions by all rewards."""
        return score_completions(
            self.rewards,
            completions=drawn.completions,
            answers=[prompt.answer for prompt in drawn.per_row],
            columns=drawn.columns(needs_of(self.rewards)),
        )

    def answers(
        self, title: str, problems: Iterable[Problem], total: int, *, samples: int, seed: int, batch_size: int
    ) -> Generator[tuple[Samples, ScoredBatch]]:
        """Judged completions of ``total`` problems, batch by batch, with a progress bar; closes rewards and
        environments when it is closed itself."""
        rest, done = iter(problems), 0
        with self.closed(), progress_bar(title, total) as advance:
            while batch := list(islice(rest, max(1, batch_size // samples))):
                drawn = self.sample(batch, samples=samples, seed=seed)
                yield drawn, self.judge(drawn)
                done += len(batch)
                advance(done)


def load_answerer(trained: ServedModel, device: str, **sampling: Any) -> Answerer:
    """A trained policy in the memory of ``device``, with the rewards it was trained on.

    Args:
        sampling: fields of `SamplingParams`; those that are None or not named are as in the training.
    """
    from grpo_pl.policy.loading import choose_device
    from grpo_pl.rollout.episode_settings import EpisodeSettings
    from grpo_pl.rollout.native.decoder_choice import TORCH, resumed_decoder
    from grpo_pl.rollout.native.engine import NativeEngine
    from grpo_pl.rollout.sampler import CompletionSampler

    drawing = replace(trained.sampling, **{name: value for name, value in sampling.items() if value is not None})
    episodes, pool = build(EpisodeSettings, dict(trained.episodes), "episodes"), None
    if trained.environment is not None:
        from grpo_pl.extras.agents.pool import EnvironmentPool

        pool = EnvironmentPool(build_environment(trained.environment, trust=trained.trust_rewards), episodes)
    rewards = build_rewards(trained.rewards, trust_rewards=trained.trust_rewards)
    for reward in rewards:
        reward.check()
    model = trained.load_policy(choose_device(device))
    engine = NativeEngine()
    engine.decoder, line = resumed_decoder(trained.decoder or TORCH, model)  # before there was a kernel, torch drew
    if line is not None:
        log.warning(line)
    return Answerer(
        computing=partial(trained.computing, model),
        sampler=CompletionSampler(
            engine=engine, template=trained.template, tokenizer=trained.tokenizer, pool=pool, episodes=episodes
        ),
        model=model,
        sampling=drawing,
        rewards=rewards,
    )


def leave_no_room(
    problems: Iterable[Problem],
    total: int,
    fits: Fits,
    say: Callable[[str], Any],
    part: str = "",
    split: str = "",
    *,
    drop_refused: bool = False,
) -> set[int]:
    """Ids of the problems that do not fit into the model's context; says how many of ``total`` they are.

    Args:
        drop_refused: those that the chat template refuses are among them, unless it refuses all.

    Raises:
        ValueError: none fits, or the chat template refuses one.
    """
    long, refused, refusal = set[int](), set[int](), ""
    for problem in problems:
        try:
            long |= set() if fits(problem.asked, problem.columns) else {problem.id}
        except ValueError as error:
            refusal = refusal or f"prompt {problem.id}: {error}"
            refused.add(problem.id)
            if not drop_refused or len(refused) == total:
                raise ValueError(f"{part}{split}{refusal}") from error
    if refused:
        say(f"{part}{len(refused)} of {total} {split}prompts are refused and left out; the first: {refusal}")
    what = f"{part}{len(long)} of {total} {split}prompts leave no room for a completion"
    if long and len(long | refused) == total:
        raise ValueError(f"{what}: {fits}. Lower {fits.setting}.")
    if long:
        say(f"{what} and are left out: {fits}.")
    return long | refused


def training_problems(source: PromptSource, count: int) -> list[Problem]:
    """The first ``count`` different training problems in the order of the rollouts, or as many as turn up."""
    found: dict[int, Problem] = {}
    fruitless = step = 0
    while len(found) < count and fruitless < FRUITLESS:
        before = len(found)
        for prompt in source.prompts(step, count=min(DRAW, count)):
            found.setdefault(prompt.id, prompt)
        fruitless = 0 if len(found) > before else fruitless + 1
        step += 1
    return list(found.values())[:count]
