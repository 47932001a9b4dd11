"""Episodes: the policy acts, its environment answers, and both are one row of tokens; all of a step at once.

All episodes that go on draw their next actions in one batch, all environments play theirs at the same time, and the
observations join the rows. The batch depends on keys and weights alone, never on how fast an environment answers, so
that a rollout is repeated to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, Unpack, runtime_checkable

import torch

from grpo_pl.environment import Blame, Environment, Transition, failed
from grpo_pl.extras.agents.episode_rows import Episode, EpisodeRow, Segment, Turn, rollout_of
from grpo_pl.extras.agents.pool import EnvironmentPool, PoolLimits
from grpo_pl.functional.sampling import small_seed
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import context_length
from grpo_pl.rollout.engine import RolloutEngine, RolloutInterrupted, Watching, counting_on, generate_request
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.texts import TextStream
from grpo_pl.rollout.thinking import draw_completions
from grpo_pl.types import NO_TURN, GenerateRequest, Problem, Rollout, SampleKey, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """The episodes that an engine is asked for. It holds values only, so that it goes to other processes as it is."""

    dialogue: Dialogue
    environment: Environment
    pool_limits: PoolLimits
    problems: Sequence[Problem]
    """One for each prompt of ``first``."""
    first: GenerateRequest
    """The first turn, before the environment has shown anything; later turns have other contexts, keys and lengths."""
    limits: EpisodeSettings
    context: int
    """Most tokens of an episode and its prompt."""

    @property
    def pad_token_id(self) -> int:
        return self.first.pad_token_id

    def split(self, parts: int) -> list[EpisodeRequest]:
        """As ``GenerateRequest.split``."""
        problems = iter(self.problems)
        parted = self.first.split(parts)
        return [replace(self, first=first, problems=tuple(islice(problems, len(first.keys)))) for first in parted]


AnyRequest = GenerateRequest | EpisodeRequest
EngineOutput = tuple[Rollout, list[Episode]]
"""A rollout, and the episode of each row if episodes were asked for."""


@runtime_checkable
class PlaysEpisodes(Protocol):
    """An engine that plays whole episodes, beside environments of its own; for others every turn is a ``generate``."""

    def play(self, model: PreTrainedModel, request: EpisodeRequest, **watching: Unpack[Watching]) -> EngineOutput:
        """Arguments, result and errors are those of `run_episodes`."""


def run_episodes(
    engine: RolloutEngine,
    model: PreTrainedModel,
    *,
    dialogue: Dialogue,
    pool: EnvironmentPool,
    problems: Sequence[Problem],
    keys: Sequence[Sequence[SampleKey]],
    sampling: SamplingParams,
    limits: EpisodeSettings,
    **watching: Unpack[Watching],
) -> EngineOutput:
    """Plays G episodes of each of P problems, which all begin with the same reset: B = P · G rows, and their episodes.

    A row is prompt, action, observation, action, … and ends with an action; the actions are the tokens that the policy
    drew. Turn k draws with the key of ``turn=k`` and positions from 0, so that it can be drawn again from its context
    alone. A fault of an environment costs its episode. One whose reset failed, or that had no room for an action, is a
    row of a single padding token that no turn wrote, behind as much of its prompt as the context holds.

    Args:
        dialogue: writes what stands between actions.
        pool: none of its episodes is open; afterwards none is either, and after an error it is closed.
        keys: (P, G) names of the episodes, at turn 0.
        sampling: how actions are drawn; ``max_completion_length`` is the most tokens of one action.
        watching: ``progress`` is called with the tokens of actions drawn and the episodes that have ended, and
            ``should_stop`` asked between tokens and while environments work.

    Raises:
        ValueError: before the first reset: limits that the context has no room for, a template that rewrites earlier
            turns, an environment that refuses its settings.
        RolloutInterrupted: ``should_stop`` turned true.
        PolicyDiverged: the policy's logits are not finite.
    """
    context = min(context_length(model.config) or 1 << 30, engine.max_tokens or 1 << 30)
    limits.check_context(dialogue, pool.environment, context)
    prompts = [dialogue.prompt_ids(problem.asked) for problem in problems]
    first = generate_request(
        model,
        dialogue.tokenizer,
        # one that is empty begins with what its environment shows
        prompt_ids=[prompt or [int(dialogue.tokenizer.pad_token_id)] for prompt in prompts],
        keys=keys,
        sampling=sampling,
        prefix=dialogue.template.prefill,
        thought=dialogue.template.thought(sampling, dialogue.tokenizer),
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
    if isinstance(engine, PlaysEpisodes):
        return engine.play(model, request, **watching)
    return play_episodes(request, engine, model, pool, device=model.device, **watching)


def play_episodes(
    request: EpisodeRequest,
    engine: RolloutEngine,
    model: PreTrainedModel,
    pool: EnvironmentPool,
    *,
    device: torch.device,
    **watching: Unpack[Watching],
) -> EngineOutput:
    """Plays the episodes in this process, every turn by ``engine``; the rest as `run_episodes`."""
    owners = [(p, key) for p, group in enumerate(request.first.keys) for key in group]
    most = request.limits.max_episode_tokens or 1 << 60
    prompts = [list(prompt)[: request.context - 1] for prompt in request.first.prompt_ids]
    rows = [EpisodeRow(n, request.problems[p], key, Segment(prompts[p]), most) for n, (p, key) in enumerate(owners)]
    batch = getattr(engine, "max_batch_rows", 0) or len(rows)
    try:
        pool.start()
        turns = engine.continuing(model, rows=min(batch, len(rows)))
        driver = _Driver(request, engine, turns, model, pool, watching)
        for begin in range(0, len(rows), batch):
            driver.play(rows[begin : begin + batch])
        for row in rows:
            row.order_segments()
    except BaseException:
        pool.close()
        raise
    return rollout_of(rows, request.first.group_size, request.pad_token_id, device), [row.episode() for row in rows]


@dataclass
class _Driver:
    """Plays rows to their ends, turn by turn."""

    request: EpisodeRequest
    engine: RolloutEngine
    turns: RolloutEngine  # draws most turns: it may keep what it computed for the next one
    model: PreTrainedModel
    pool: EnvironmentPool
    watching: Watching
    tokens: int = 0  # of actions drawn
    ended: int = 0  # episodes
    dialogues: dict[str, Dialogue] = field(default_factory=dict)  # of environments that write their prompts

    def play(self, rows: Sequence[EpisodeRow]) -> None:
        for row in rows:
            key, problem = row.key, row.problem
            seed = small_seed(key.seed, key.split, key.step, key.attempt, key.prompt_id)
            columns = {"question": problem.question, "answer": problem.answer, **problem.columns}
            self.pool.reset(row.number, seed=seed, row=columns)
        self._take_answers(rows, self._begin)
        while live := [row for row in rows if row.finish is None]:
            self._act(live)
            self._take_answers(live, self._observe)

    def _take_answers(self, rows: Sequence[EpisodeRow], take: Callable[[EpisodeRow, Transition], None]) -> None:
        """Hands the environments' answers to ``take``, and adds the last rewards of episodes that a limit ends."""
        for row, answer in self._answers(rows):
            take(row, answer)
        stopped = [row for row in rows if row.finish in ("turns", "tokens")]
        for row in stopped:
            self.pool.finish(row.number)
        for row, due in self._answers(stopped):
            assert row.finish is not None
            row.conclude(row.finish, due)
        self.ended += sum(row.finish is not None for row in rows)
        if (progress := self.watching.get("progress")) is not None:
            progress(self.tokens, self.ended)

    def _answers(self, rows: Sequence[EpisodeRow]) -> list[tuple[EpisodeRow, Transition]]:
        found, should_stop = dict[int, Transition](), self.watching.get("should_stop")
        while len(found) < len(rows):
            if should_stop is not None and should_stop():
                raise RolloutInterrupted
            found |= self.pool.collect(0.2)  # seconds until `should_stop` is asked again
        return [(row, found[row.number]) for row in rows]

    def _begin(self, row: EpisodeRow, start: Transition) -> None:
        row.start = start
        if start.done:
            row.finish = "environment"
            return
        row.most, row.stop = _most_tokens(start), _stop_texts(start)
        try:
            if self.request.environment.writes_prompt:
                row.at.dialogue = self._dialogue_with(start.info)
                row.at.prompt = self._written(row.at.dialogue, start)
            else:
                row.at.prompt = self.request.dialogue.prompt_ids(row.problem.asked, start.observation)
        except Exception as error:  # a template may raise anything; without the observation it wrote this prompt
            return self._refuse(row, error)
        if row.room(self.request.context) < 1:
            row.finish = "tokens"
            row.at.prompt = row.at.prompt[: self.request.context - 1]  # if that is all, a padding token follows

    def _act(self, rows: Sequence[EpisodeRow]) -> None:
        """Draws the next action of each row and begins to play it. A row that has less left of the context than others
        draw is drawn apart from them, because a model or an engine may go no further."""
        dialogue, first, context = self.request.dialogue, self.request.first, self.request.context
        longest = min(first.sampling.max_completion_length, max(row.room(context) for row in rows))
        parts = dict[int, list[EpisodeRow]]()
        for row in rows:
            left = context - len(row.at.prompt) - len(row.at.tokens)
            parts.setdefault(min(longest, left, row.most or longest), []).append(row)
        for most, part in parts.items():
            request = replace(
                first,
                prompt_ids=[row.at.prompt + row.at.tokens for row in part],
                keys=[[row.next_key] for row in part],
                sampling=replace(first.sampling, max_completion_length=most),
            )
            engine = self.turns if most == longest else self.engine
            watching = counting_on(self.watching, self.tokens, self.ended, ends=False)
            drawn = draw_completions(engine, self.model, request, **watching)
            tensors = (drawn.completion_ids, drawn.sampling_logprobs, drawn.action_mask, drawn.lengths)
            tokens_of, logprobs_of, written, lengths = (tensor.tolist() for tensor in tensors)
            for i, (row, length, reason) in enumerate(zip(part, lengths, drawn.finish_reasons, strict=True)):
                tokens, logprobs, own = tokens_of[i], logprobs_of[i], written[i]
                count, turn = min(length, row.room(context)), len(row.turns)
                reason = reason if count == length else "length"
                stopped = _stopped(row.stop, tokens[:count], dialogue) if row.stop else None
                if stopped is not None:  # drawn beyond it, as an engine's kernel may know no texts
                    count, reason = stopped[0], "stop"
                row.append(tokens[:count], logprobs[:count], [turn if mine else NO_TURN for mine in own[:count]])
                action = dialogue.template.completion_text(tokens[:count], dialogue.tokenizer)
                at = row.segments.index(row.at)
                row.turns.append(Turn(action=action, finish_reason=reason, transition=Transition(), segment=at))
                row.at.turns += 1
                self.tokens += count
                told = {
                    "finish_reason": reason,
                    "prompt_tokens": len(row.at.prompt) + len(row.at.tokens) - count,
                    "completion_tokens": count,
                    **({} if stopped is None else {"before_stop": stopped[1]}),
                }
                self.pool.step(row.number, action, drawn=told if self.request.environment.writes_prompt else None)

    def _observe(self, row: EpisodeRow, transition: Transition) -> None:
        row.turns[-1] = replace(row.turns[-1], transition=transition)
        row.most, row.stop = _most_tokens(transition), _stop_texts(transition)
        if transition.done:
            row.finish = "environment"
        elif len(row.turns) == self.request.limits.max_turns:
            row.finish = "turns"
        if row.finish is not None:
            return
        number = transition.info.get("segment", 0) if self.request.environment.writes_prompt else 0
        if type(number) is not int or not 0 <= number <= len(row.segments):  # the word of an agent's process
            return self._refuse(row, ValueError(f"there is no segment {number!r:.40}."))
        if number == len(row.segments):
            self._begin_segment(row, transition)
        else:
            row.at = row.segments[number]
            try:
                dialogue = row.at.dialogue or self.request.dialogue
                ids = dialogue.observation_ids(transition.observation, row.at.tokens[-1])
            except ValueError as error:
                return self._refuse(row, error)
            if len(ids) < row.room(self.request.context):
                row.append(ids, [0.0] * len(ids), [NO_TURN] * len(ids))
            else:
                row.finish = "tokens"

    def _begin_segment(self, row: EpisodeRow, transition: Transition) -> None:
        """Goes on with another prompt of the row's agent, where there is room for it and an action."""
        try:
            dialogue = self._dialogue_with(transition.info)
            prompt = self._written(dialogue, transition)
        except Exception as error:  # a template may raise anything
            return self._refuse(row, error, blame=self.request.environment.blame)
        if min(row.left, self.request.context) > len(prompt):
            row.begin(Segment(prompt, dialogue))
        else:
            row.finish = "tokens"

    def _written(self, dialogue: Dialogue, transition: Transition) -> list[int]:
        """The prompt that an environment has written; the policy starts from a token, also where it says nothing."""
        return dialogue.prompt_ids("", transition.observation) or [self.request.pad_token_id]

    def _dialogue_with(self, info: Mapping[str, Any]) -> Dialogue:
        """The dialogue with the tools that an agent offers; most sessions of a rollout have the same."""
        name = json.dumps([info["tools"], info["told_tools"]])
        if name not in self.dialogues:
            self.dialogues[name] = replace(
                self.request.dialogue, tools=info["tools"], told_tools=info["told_tools"] or ""
            )
        return self.dialogues[name]

    def _refuse(self, row: EpisodeRow, error: Exception, *, blame: Blame = "environment") -> None:
        """Ends an episode whose environment showed what the template cannot write."""
        self.pool.release(row.number)
        row.conclude("environment", failed("malformed", str(error), blame=blame))


def _most_tokens(transition: Transition) -> int | None:
    """The limit on the next action that an agent asks for."""
    most = transition.info.get("max_tokens")
    return most if isinstance(most, int) and most > 0 else None


def _stop_texts(transition: Transition) -> tuple[str, ...]:
    """The texts at which an agent wants the next action to end."""
    given = transition.info.get("stop")
    return tuple(text for text in given if isinstance(text, str) and text) if isinstance(given, list) else ()


def _stopped(stop: Sequence[str], tokens: Sequence[int], dialogue: Dialogue) -> tuple[int, str] | None:
    """Tokens up to the one that completes a stop string, and the text in front of the string; None without one. It may
    be the name of a special token, which no text shows."""
    tokenizer = dialogue.tokenizer
    special = {tokenizer.convert_tokens_to_ids(text) for text in stop if text in tokenizer.all_special_tokens}
    end = next((number for number, token in enumerate(tokens, 1) if token in special), None)
    text = TextStream(tokenizer, stop, prefix=dialogue.template.begins(tokenizer))
    text.push(tokens[:end])
    text.finish()
    if text.stopped:
        return len(text.tokens), text.text
    return None if end is None else (end, text.text)
