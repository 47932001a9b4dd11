"""``Reward`` and ``Score``: from the text of a completion and its gold answer to a number with a reason."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

Status = Literal[
    "ok",  # judged, full value
    "wrong",  # judged, less than full value
    "no_answer",  # nothing to judge in the completion
    "bad_gold",  # the gold answer cannot be read: the completion is not to blame
    "timeout",  # judging took longer than the soft limit
    "killed",  # judging ignored the soft limit and its process was killed
    "crashed",  # judging ended its own process
    "too_long",  # the answer is larger than anything worth judging
    "unavailable",  # a judge, model or worker could not be reached: the completion is not to blame
]
Columns = Mapping[str, Sequence[Any]]
"""Further columns of a batch of rows, each with one value per completion."""


@dataclass(frozen=True)
class StepScores:
    """What the steps of one completion are worth, and where each ends.

    ``ends[k]`` is the offset in characters just behind step k, so that ``completion[: ends[k]]`` is all of the text up
    to and including it; prefilled text counts. Offsets are text, not tokens: whoever knows the tokenizer maps a step
    to the token that holds its last character, ``completion[ends[k] - 1]``.
    """

    values: tuple[float, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.ends):
            raise ValueError(f"{len(self.values)} values for {len(self.ends)} ends of steps: give one each.")
        if any(a >= b for a, b in pairwise((0, *self.ends))):
            raise ValueError(f"ends of steps must be positive and increase, got {self.ends}.")
        if not all(map(math.isfinite, self.values)):
            raise ValueError(f"values of steps must be finite, got {self.values}.")


@dataclass(frozen=True)
class Score:
    """One reward of one completion.

    ``value`` is ``None`` exactly when the completion is not to blame (``bad_gold``, ``unavailable``); such a sample
    leaves the baseline and the loss. Whatever the completion caused itself (``timeout``, ``crashed``, …) is 0.
    """

    value: float | None
    status: Status
    detail: str = ""
    steps: StepScores | None = None
    """The parts of ``value``, from a reward that scores steps."""

    @property
    def correct(self) -> bool | None:
        """Whether it has the full value, 1 or more; None where it has no value."""
        return None if self.value is None else self.value >= 1.0

    def to_dict(self) -> dict[str, Any]:
        """``value``, ``status`` and ``detail``, as every table, file and reply of the server writes them."""
        return {"value": self.value, "status": self.status, "detail": self.detail}


class MissingColumn(ValueError):
    """The rows lack a column that a reward needs, or hold something there that it has no rule for."""


class RewardFailed(RuntimeError):
    """A reward raised an exception, or returned what are no scores; says which, where, and what was saved."""

    last_checkpoint: Path | None = None
    """The state after the last completed rollout, where one was completed."""

    def __str__(self) -> str:
        saved = self.last_checkpoint and f". Saved: {self.last_checkpoint}; --resume goes on once it is mended."
        return super().__str__() + (saved or "")


@dataclass(kw_only=True, init=False, repr=False, eq=False)  # a subclass that is none keeps its own constructor
class Reward(ABC):
    """Scores a batch of completions. Subclass as a ``@dataclass(kw_only=True)``: its fields are the YAML arguments, and
    these of all rewards are among them. A subclass gives ``name`` a default."""

    name: str
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right (pass@k, majority, ``expected``)."""
    on_error: str = field(default="raise", init=False)
    """What follows when calling it raises. ``raise``: the run ends, its last rollout saved first; ``none``: every
    completion of the call scores None, which is counted as ``unavailable``."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that are made only where a reward asks for them: ``completion_length`` (tokens of each completion)
        and ``completion_ids`` (the tokens). By default what the rewards among its arguments need."""
        return needs_of(held_by(self))

    @property
    def asynchronous(self) -> bool:
        """Whether it mostly waits for something outside, so that it runs beside the others; by default, whether a
        reward among its arguments does."""
        return any(reward.asynchronous for reward in held_by(self))

    @abstractmethod
    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        """Scores ``completions[i]`` (prefilled text such as ``<think>`` included) against ``answers[i]``.

        Args:
            completions: the texts that the policy wrote.
            answers: one gold answer per completion.
            columns: further columns of the data set, each as long as ``completions``; always holds ``prompt``,
                the rendered prompt text.

        Raises:
            MissingColumn: whoever made the rows left something out.
        """

    def start(self) -> None:
        """Starts processes now instead of when they are first needed; by default those of rewards among its
        arguments."""
        for reward in held_by(self):
            reward.start()

    def close(self) -> None:
        """Releases processes and connections; by default those of rewards among its arguments."""
        for reward in held_by(self):
            reward.close()

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        """What is wrong with each gold answer, empty where it can be judged against; by default nothing is known."""
        return [""] * len(golds)

    def init_args(self) -> dict[str, Any]:
        """The arguments that rebuild this reward, as written next to an exported model; plain JSON values."""
        maker = next(kind for kind in type(self).__mro__ if "__init__" in vars(kind))
        if "__dataclass_params__" not in vars(maker):
            raise TypeError(f"{type(self).__name__} is not a dataclass: make it one, or override init_args().")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {name: _described(value) for name, value in values.items()}

    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, as a configuration file holds them."""
        kind = type(self)
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": self.init_args()}


class PerCompletionReward(Reward):
    """Scores each completion for itself; where the gold answer cannot be judged against, it is ``bad_gold``."""

    @abstractmethod
    def score(self, completion: str, gold: str) -> Score:
        """The score of one completion against a gold answer without fault."""

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        rows = zip(completions, answers, self.gold_faults(answers), strict=True)
        return [Score(None, "bad_gold", fault) if fault else self.score(text, gold) for text, gold, fault in rows]


class TextAnswerReward(PerCompletionReward):
    """Looks for the text of the gold answer, which must not be empty."""

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold.strip() else "empty" for gold in golds]


def correctness_index(rewards: Sequence[Reward]) -> int:
    """The place of the reward that says what a right answer is.

    Raises:
        ValueError: there is none; `check_rewards` refuses such a list.
    """
    for index, reward in enumerate(rewards):
        if reward.correctness:
            return index
    raise ValueError("no reward has `correctness: true`: exactly one must say what a right answer is.")


def needs_of(rewards: Iterable[Reward]) -> frozenset[str]:
    """What any of these rewards needs, see `Reward.needs`."""
    return frozenset().union(*(reward.needs for reward in rewards))


def held_by(value: Any) -> Iterator[Reward]:
    """The rewards among the arguments of a reward, in lists and mappings too."""
    if isinstance(value, Reward):
        arguments = [getattr(value, f.name, None) for f in fields(value)]
    else:
        arguments = list(value.values()) if isinstance(value, Mapping) else list(value)
    for argument in arguments:
        if isinstance(argument, Reward):
            yield argument
        elif isinstance(argument, Mapping | list | tuple):
            yield from held_by(argument)


def _described(value: Any) -> Any:
    """``value`` with every reward in it, however deep, as its ``spec``."""
    if isinstance(value, Reward):
        return value.spec()
    if isinstance(value, Mapping):
        return {key: _described(inner) for key, inner in value.items()}
    return [_described(inner) for inner in value] if isinstance(value, list | tuple) else value
