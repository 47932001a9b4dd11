"""Episodes: the policy acts, its environment answers, and all of it is one row of tokens; all of a step at once.

Turns are drawn in waves: every episode that goes on draws its next action, all environments play theirs at the same
time, and what they show joins the rows. Who is in a wave depends on keys and weights alone, never on how fast an
environment answers, so that a rollout is repeated to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.environments.base import Environment, Observation, Transition, episode_value, failed
from grpo_pl.environments.pool import EnvironmentPool, PoolLimits
from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.functional.sampling import small_seed
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import context_length
from grpo_pl.policy.template import Fits
from grpo_pl.rollout.engine import ProgressFn, RolloutEngine, RolloutInterrupted, pad_left
from grpo_pl.rollout.requests import generate_request
from grpo_pl.types import NO_TURN, FinishReason, GenerateRequest, Problem, Rollout, SampleKey, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ASK_S = 0.2  # seconds between two looks at whether to stop, while environments work


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """When an episode ends that its environment would let go on; one action ends as a completion does."""

    max_turns: int = 8
    """Most actions."""
    max_episode_tokens: int = 0
    """Most tokens behind the prompt, observations included; 0 takes what the model's context holds."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}.")
        if self.max_episode_tokens < 0:
            raise ValueError(f"max_episode_tokens must be 0 (off) or more, got {self.max_episode_tokens}.")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action, and what it led to."""

    action: str
    """As the environment got it: the template's prefill and what the policy wrote, without special tokens."""
    finish_reason: FinishReason
    """``length`` where the action was cut; it was played as it was."""
    transition: Transition
    """Of the last turn before a limit with the reward that was still due."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happened in one episode; its tokens are a row of the `Rollout`."""

    start: Transition
    """What the reset led to."""
    turns: Sequence[Turn]
    finish_reason: FinishReason

    @property
    def transitions(self) -> list[Transition]:
        """The reset's, then one a turn."""
        return [self.start, *(turn.transition for turn in self.turns)]

    @property
    def value(self) -> float | None:
        """Σ_t r_t; None where something but the policy failed, or nothing was done."""
        return episode_value(self.transitions) if self.turns else None

    @property
    def rewards(self) -> list[float]:
        """One a turn."""
        return [turn.transition.reward for turn in self.turns]

    @property
    def states(self) -> list[str]:
        """The state that each turn's action was taken in."""
        return [transition.state for transition in self.transitions[: len(self.turns)]]

    @property
    def invalid_actions(self) -> list[bool]:
        """Which turns' actions meant nothing to the environment."""
        return [turn.transition.invalid_action for turn in self.turns]

    @property
    def actions(self) -> list[str]:
        """The text of each turn's action."""
        return [turn.action for turn in self.turns]

    @property
    def observations(self) -> list[Observation]:
        """What followed each action; the last one is in no row."""
        return [turn.transition.observation for turn in self.turns]

    @property
    def status(self) -> str:
        """What went wrong, as ``Transition.status``."""
        return self.transitions[-1].status

    @property
    def detail(self) -> str:
        """What went wrong, in one line."""
        return self.transitions[-1].detail


def run_episodes(
    engine: RolloutEngine,
    model: PreTrainedModel,
    *,
    dialogue: Dialogue,
    pool: EnvironmentPool,
    problems: Sequence[Problem],
    keys: Sequence[Sequence[SampleKey]],
    sampling: SamplingParams,
    limits: EpisodeLimits,
    progress: ProgressFn | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Drawn:
    """Plays ``len(keys[p])`` episodes, the same number G for every problem ``p``; all G begin with the same reset.

    A row is prompt, action, observation, action, … and ends with an action; what the policy wrote stays the tokens
    that it drew. Turn k draws with the key of ``turn=k`` and positions from 0, so that it can be drawn again from its
    context alone. What an environment does wrong costs its episode. One whose reset failed, or that had no room for an
    action, is a row of a single padding token that no turn wrote, behind as much of its prompt as the context holds.

    Args:
        dialogue: what stands between actions.
        pool: none of its episodes is open; afterwards none is either, and after an error it is closed.
        keys: (P, G) names of the episodes, at turn 0.
        sampling: how actions are drawn; ``max_completion_length`` is the most tokens of one action.
        progress: called with the tokens of actions drawn and the episodes that have ended.
        should_stop: asked between tokens and while environments work.

    Returns:
        B = P · G rows, and as many episodes in the same order.

    Raises:
        ValueError: before the first reset: limits that the context has no room for, a template that rewrites earlier
            turns, an environment that refuses its settings.
        RolloutInterrupted: ``should_stop`` turned true.
        PolicyDiverged: the policy's logits are not finite.
    """
    context = min(context_length(model.config) or 1 << 30, engine.max_tokens or 1 << 30)
    check_limits(dialogue, pool.environment, limits, context)
    prompts = [dialogue.prompt_ids(problem.asked) for problem in problems]
    first = generate_request(
        model,
        dialogue.tokenizer,
        # one that is empty begins with what its environment shows
        prompt_ids=[prompt or [int(dialogue.tokenizer.pad_token_id)] for prompt in prompts],
        keys=keys,
        sampling=sampling,
        prefix=dialogue.template.prefill,
    )
    request = EpisodeRequest(
        dialogue=dialogue,
        environment=pool.environment,
        pool_limits=pool.limits,
        problems=problems,
        first=first,
        limits=limits,
        context=context,
    )
    told: dict[str, Any] = {"progress": progress, "should_stop": should_stop}
    if isinstance(engine, PlaysEpisodes):
        return engine.play(model, request, **told)
    return request.play(engine, model, pool, device=model.device, **told)


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """What episodes an engine is asked for. It holds values only, so that it goes to other processes as it is."""

    dialogue: Dialogue
    environment: Environment
    pool_limits: PoolLimits
    problems: Sequence[Problem]
    """One for each prompt of ``first``."""
    first: GenerateRequest
    """The first turn, before the environment has shown anything; each turn has other contexts, keys and lengths."""
    limits: EpisodeLimits
    context: int
    """Most tokens of an episode and its prompt."""

    @property
    def pad_token_id(self) -> int:
        return self.first.pad_token_id

    def split(self, parts: int) -> list[EpisodeRequest]:
        """As ``GenerateRequest.split``."""
        problems = iter(self.problems)
        firsts = self.first.split(parts)
        return [replace(self, first=one, problems=tuple(islice(problems, len(one.keys)))) for one in firsts]

    def play(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        pool: EnvironmentPool,
        *,
        device: torch.device,
        progress: ProgressFn | None,
        should_stop: Callable[[], bool] | None,
    ) -> Drawn:
        """Plays them here, every turn by ``engine``; arguments, result and errors are those of `run_episodes`."""
        owners = [(p, key) for p, group in enumerate(self.first.keys) for key in group]
        rows = [
            _Row(number, self.problems[p], list(self.first.prompt_ids[p])[: self.context - 1], key)
            for number, (p, key) in enumerate(owners)
        ]
        together = getattr(engine, "max_batch_rows", 0) or len(rows)
        try:
            pool.start()
            driver = _Driver(
                engine=engine,
                keeping=engine.continuing(model, rows=min(together, len(rows))),
                model=model,
                dialogue=self.dialogue,
                pool=pool,
                request=self.first,
                limits=self.limits,
                context=self.context,
                progress=progress,
                should_stop=should_stop,
            )
            for begin in range(0, len(rows), together):
                driver.play(rows[begin : begin + together])
        except BaseException:
            pool.close()
            raise
        episodes = [row.episode() for row in rows]
        return _rollout(rows, self.first.group_size, self.pad_token_id, device), episodes


@runtime_checkable
class PlaysEpisodes(Protocol):
    """An engine that plays whole episodes, beside environments of its own; for others every turn is a ``generate``."""

    def play(
        self,
        model: PreTrainedModel,
        request: EpisodeRequest,
        *,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Drawn:
        """Arguments, result and errors are those of `run_episodes`."""


Asked = GenerateRequest | EpisodeRequest
"""What an engine can be asked for."""
Drawn = tuple[Rollout, list[Episode]]
"""A rollout, and the episode of each row where some were asked for."""


@dataclass
class _Row:
    """An episode under way."""

    number: int
    problem: Problem
    prompt: list[int]
    key: SampleKey
    start: Transition = field(default_factory=Transition)
    turns: list[Turn] = field(default_factory=list)
    finish: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    logprobs: list[float] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    room: int = 0  # tokens that may still follow

    def append(self, tokens: Sequence[int], logprobs: Iterable[float], turn: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.turn_index += [turn] * len(tokens)
        self.room -= len(tokens)

    def conclude(self, finish: FinishReason, due: Transition) -> None:
        """Ends the episode; its last transition gets the reward that was due, or what went wrong."""
        self.finish = finish
        last = self.turns[-1].transition if self.turns else self.start
        reward = weighted_sum([last.reward, due.reward], [1.0, 1.0])
        last = replace(last, reward=reward, truncated=True, status=due.status, detail=due.detail, blame=due.blame)
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], transition=last)
        else:
            self.start = last

    def episode(self) -> Episode:
        assert self.finish is not None
        return Episode(start=self.start, turns=tuple(self.turns), finish_reason=self.finish)


@dataclass(kw_only=True)
class _Driver:
    """Plays rows to their ends, in waves."""

    engine: RolloutEngine
    keeping: RolloutEngine  # draws most turns: it may keep what it computed for the next one
    model: PreTrainedModel
    dialogue: Dialogue
    pool: EnvironmentPool
    request: GenerateRequest  # each turn replaces the contexts, keys and length in it
    limits: EpisodeLimits
    context: int
    progress: ProgressFn | None
    should_stop: Callable[[], bool] | None

    def __post_init__(self) -> None:
        self._tokens = self._ended = 0

    def play(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            key, problem = row.key, row.problem
            seed = small_seed(key.seed, key.split, key.step, key.attempt, key.prompt_id)
            columns = {"question": problem.question, "answer": problem.answer, **problem.columns}
            self.pool.reset(row.number, seed=seed, row=columns)
        self._wave(rows, self._begin)
        while live := [row for row in rows if row.finish is None]:
            self._act(live)
            self._wave(live, self._observe)

    def _wave(self, rows: Sequence[_Row], take: Callable[[_Row, Transition], None]) -> None:
        """Hands what the environments answer to ``take``; where a limit ends episodes, their last rewards as well."""
        answers = self._answers(len(rows))
        for row in rows:
            take(row, answers[row.number])
        stopped = [row for row in rows if row.finish in ("turns", "tokens")]
        for row in stopped:
            self.pool.finish(row.number)
        answers = self._answers(len(stopped))
        for row in stopped:
            assert row.finish is not None
            row.conclude(row.finish, answers[row.number])
        self._ended += sum(row.finish is not None for row in rows)
        if self.progress is not None:
            self.progress(self._tokens, self._ended)

    def _answers(self, count: int) -> dict[int, Transition]:
        found: dict[int, Transition] = {}
        while len(found) < count:
            if self.should_stop is not None and self.should_stop():
                raise RolloutInterrupted
            found |= self.pool.collect(_ASK_S)
        return found

    def _begin(self, row: _Row, start: Transition) -> None:
        row.start = start
        if start.done:
            row.finish = "environment"
            return
        try:
            prompt = self.dialogue.prompt_ids(row.problem.asked, start.observation)
        except Exception as error:  # a template may raise anything; without the observation it wrote this prompt
            return self._refuse(row, error)
        row.room = min(self.limits.max_episode_tokens or self.context, self.context - len(prompt))
        row.prompt = prompt[: self.context - 1]  # where that is all, a padding token follows
        if row.room < 1:
            row.finish = "tokens"

    def _act(self, rows: Sequence[_Row]) -> None:
        """Draws the next action of each row and begins to play it. A row that has less left of the context than others
        draw is drawn apart from them, for a model or an engine may go no further."""
        longest = min(self.request.sampling.max_completion_length, max(row.room for row in rows))
        parts = dict[int, list[_Row]]()
        for row in rows:
            parts.setdefault(min(longest, self.context - len(row.prompt) - len(row.tokens)), []).append(row)
        for most, part in parts.items():
            self._draw(part, self.keeping if most == longest else self.engine, most)

    def _draw(self, rows: Sequence[_Row], engine: RolloutEngine, longest: int) -> None:
        before, ended = self._tokens, self._ended
        progress = self.progress
        request = replace(
            self.request,
            prompt_ids=[row.prompt + row.tokens for row in rows],
            keys=[[replace(row.key, turn=len(row.turns))] for row in rows],
            sampling=replace(self.request.sampling, max_completion_length=longest),
        )
        drawn = engine.generate(
            self.model,
            request,
            progress=None if progress is None else lambda tokens, _: progress(before + tokens, ended),
            should_stop=self.should_stop,
        )
        columns = (drawn.completion_ids.tolist(), drawn.sampling_logprobs.tolist(), drawn.lengths.tolist())
        for row, tokens, logprobs, length, reason in zip(rows, *columns, drawn.finish_reasons, strict=True):
            count = min(length, row.room)
            row.append(tokens[:count], logprobs[:count], len(row.turns))
            action = self.dialogue.template.completion_text(tokens[:count], self.dialogue.tokenizer)
            row.turns.append(
                Turn(action=action, finish_reason=reason if count == length else "length", transition=Transition())
            )
            self._tokens += count
            self.pool.step(row.number, action)

    def _observe(self, row: _Row, transition: Transition) -> None:
        row.turns[-1] = replace(row.turns[-1], transition=transition)
        if transition.done:
            row.finish = "environment"
        elif len(row.turns) == self.limits.max_turns:
            row.finish = "turns"
        else:
            try:
                ids = self.dialogue.observation_ids(transition.observation, row.tokens[-1])
            except ValueError as error:
                return self._refuse(row, error)
            if len(ids) < row.room:
                row.append(ids, [0.0] * len(ids), NO_TURN)
            else:
                row.finish = "tokens"

    def _refuse(self, row: _Row, error: Exception) -> None:
        """Ends an episode whose environment showed what the template cannot write."""
        self.pool.release(row.number)
        row.conclude("environment", failed("malformed", str(error), blame="environment"))


def check_limits(dialogue: Dialogue, environment: Environment, limits: EpisodeLimits, context: int) -> int:
    """The tokens behind a prompt that an episode may have, or at the very least has once it reaches its last turn.

    Raises:
        ValueError: a template that rewrites earlier turns, or limits that the context has no room for.
    """
    role = environment.observation_role
    dialogue.check(role)
    between = len(dialogue.observation_ids("" if role == "user" else [{"role": role, "content": ""}], None))
    least = limits.max_turns + (limits.max_turns - 1) * between  # one token an action, nothing to show
    most = limits.max_episode_tokens
    if 0 < most < least:
        raise ValueError(
            f"max_turns={limits.max_turns} takes {least} tokens at the very least, {between} of them between two "
            f"actions: max_episode_tokens={most} can never hold that."
        )
    if most >= context:
        raise ValueError(
            f"episodes.max_episode_tokens is {most}, but the model's context of {context} must hold a prompt as well."
        )
    if least >= context:
        raise ValueError(
            f"max_turns={limits.max_turns} (at least {least} tokens) exceeds the model's context of {context} whatever "
            "the prompt: lower it."
        )
    return most or least


def episodes_fit(dialogue: Dialogue, environment: Environment, limits: EpisodeLimits, context: int) -> Fits:
    """Tells whether a prompt leaves room for an episode; what the environment shows first is not known before.

    Raises:
        ValueError: as `check_limits`.
    """
    length = check_limits(dialogue, environment, limits, context)
    setting = "episodes.max_episode_tokens" if limits.max_episode_tokens else "episodes.max_turns"
    return Fits(dialogue.prompt_ids, context=context, length=length, setting=setting)


def _rollout(rows: Sequence[_Row], group_size: int, pad: int, device: torch.device) -> Rollout:
    for row in rows:
        row.prompt = row.prompt or [pad]
        if not row.tokens:
            row.append([pad], [0.0], NO_TURN)
    prompt_ids, prompt_mask = pad_left([row.prompt for row in rows], pad)

    def right(values: Iterable[Tensor], fill: float) -> Tensor:
        return pad_sequence(list(values), batch_first=True, padding_value=fill).to(device)

    turn_index = right((torch.tensor(row.turn_index) for row in rows), NO_TURN)
    return Rollout(
        group_size=group_size,
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        completion_ids=right((torch.tensor(row.tokens) for row in rows), pad),
        completion_mask=right((torch.ones(len(row.tokens), dtype=torch.bool) for row in rows), False),
        sampling_logprobs=right((torch.tensor(row.logprobs) for row in rows), 0.0),
        finish_reasons=[row.episode().finish_reason for row in rows],
        action_mask=turn_index != NO_TURN,
        turn_index=turn_index,
    )
