"""An episode as a row of tokens: its turns and segments while it is played, and the rollout that the rows become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.environment import Transition, episode_value
from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.types import NO_TURN, FinishReason, Problem, Rollout, SampleKey


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action and the environment's answer."""

    action: str
    """The template's prefill and what the policy wrote, without special tokens; of an agent's stop string, which ends
    the text that the agent got, everything up to the token that completes it."""
    finish_reason: FinishReason
    """``length`` where the action was cut; it was played as it was."""
    transition: Transition
    """Of the last turn before a limit with the reward that was still due."""
    segment: int = 0
    """The segment of the row that the action is in."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The turns of one episode; its tokens are a row of the `Rollout`."""

    start: Transition
    """Of the reset."""
    turns: Sequence[Turn]
    finish_reason: FinishReason

    @property
    def transitions(self) -> list[Transition]:
        """That of the reset, then one a turn."""
        return [self.start, *(turn.transition for turn in self.turns)]

    @property
    def value(self) -> float | None:
        """Σ_t r_t; None if something other than the policy failed, or nothing was done."""
        return episode_value(self.transitions) if self.turns else None

    @property
    def states(self) -> list[str]:
        """The state that each turn's action was taken in."""
        return [transition.state for transition in self.transitions[: len(self.turns)]]

    @property
    def invalid_actions(self) -> list[bool]:
        """True for each turn whose action meant nothing to the environment."""
        return [turn.transition.invalid_action for turn in self.turns]

    @property
    def actions(self) -> list[str]:
        """The text of each turn's action."""
        return [turn.action for turn in self.turns]

    @property
    def status(self) -> str:
        """``Transition.status`` of the last transition."""
        return self.transitions[-1].status

    @property
    def detail(self) -> str:
        """The fault, in one line."""
        return self.transitions[-1].detail


@dataclass(eq=False)
class Segment:
    """A prompt and what follows it; an episode has one, unless its agent begins further conversations."""

    prompt: list[int]
    dialogue: Dialogue | None = None  # of an environment that writes the prompt, with the tools that it named
    key: int | None = None  # of its draws, besides that of the episode; None for the first
    turns: int = 0
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    logprobs: list[float] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)


@dataclass
class EpisodeRow:
    """An episode under way."""

    number: int
    problem: Problem
    key: SampleKey
    at: Segment  # that of the next action
    left: int  # tokens that the limit leaves behind the first prompt
    segments: list[Segment] = field(default_factory=list)
    start: Transition = field(default_factory=Transition)
    turns: list[Turn] = field(default_factory=list)
    finish: FinishReason | None = None
    most: int | None = None  # of the next action, where its environment says so
    stop: tuple[str, ...] = ()  # texts that end it, likewise

    def __post_init__(self) -> None:
        self.segments.append(self.at)

    def append(self, tokens: Sequence[int], logprobs: Iterable[float], turns: Iterable[int]) -> None:
        self.at.tokens += tokens
        self.at.logprobs += logprobs
        self.at.turn_index += turns
        self.left -= len(tokens)

    def room(self, context: int) -> int:
        """Tokens that may still follow."""
        return min(self.left, context - len(self.at.prompt) - len(self.at.tokens))

    @property
    def next_key(self) -> SampleKey:
        """Of the next action. That of a later segment follows from its prompt, not from when it began: calls that an
        agent makes at the same time draw the same tokens in whatever order they arrive."""
        turn = self.at.turns if self.at.key is None else row_key(self.at.key, self.at.turns)
        return replace(self.key, turn=turn)

    def begin(self, segment: Segment) -> None:
        """Goes on in a further segment."""
        before = sum(other.prompt == segment.prompt for other in self.segments)
        segment.key = row_key("segment", *segment.prompt, before)
        self.left -= len(segment.prompt)
        self.at = segment
        self.segments.append(segment)

    def order_segments(self) -> None:
        """Puts the segments into an order that does not depend on when they began."""
        first, *others = range(len(self.segments))
        order = [first, *sorted(others, key=lambda number: str(self.segments[number].key))]
        self.segments = [self.segments[number] for number in order]
        self.turns = [replace(turn, segment=order.index(turn.segment)) for turn in self.turns]

    def columns(self) -> tuple[list[int], list[float], list[int], list[int]]:
        """What follows the first prompt: tokens, their log-probabilities, turns and segments."""
        found: tuple[list[int], list[float], list[int], list[int]] = [], [], [], []
        for number, segment in enumerate(self.segments):
            prompt = segment.prompt if number else []
            before, length = len(prompt), len(segment.tokens)
            found[0].extend(prompt + segment.tokens)
            found[1].extend([0.0] * before + segment.logprobs)
            found[2].extend([NO_TURN] * before + segment.turn_index)
            found[3].extend([-number] * before + [number] * length)
        return found

    def conclude(self, finish: FinishReason, due: Transition) -> None:
        """Ends the episode; its last transition gets the reward of ``due`` on top, or its fault."""
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


def rollout_of(rows: Sequence[EpisodeRow], group_size: int, pad: int, device: torch.device) -> Rollout:
    """The rows as tensors; a row without a token gets a padding token that no turn wrote."""
    for row in rows:
        row.at.prompt = row.at.prompt or [pad]
        if not row.at.tokens:
            row.append([pad], [0.0], [NO_TURN])
    prompt_ids, prompt_mask = pad_left([row.segments[0].prompt for row in rows], pad)
    tokens, logprobs, turns, segments = zip(*(row.columns() for row in rows), strict=True)

    def right(values: Iterable[list[Any]], fill: float) -> Tensor:
        return pad_sequence(list(map(torch.tensor, values)), batch_first=True, padding_value=fill).to(device)

    turn_index = right(turns, NO_TURN)
    return Rollout(
        group_size=group_size,
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        completion_ids=right(tokens, pad),
        completion_mask=right(([True] * len(own) for own in tokens), False),
        sampling_logprobs=right(logprobs, 0.0),
        finish_reasons=[row.episode().finish_reason for row in rows],
        action_mask=turn_index != NO_TURN,
        turn_index=turn_index,
        segment_index=right(segments, 0),
    )
