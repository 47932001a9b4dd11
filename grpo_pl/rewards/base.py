"""``Reward`` and ``Score``: the interface that turns a completion and its gold answer into a number with a status."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

from grpo_pl.rewards.completion_text import stated_answer

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
"""Further columns of a batch, by name; each holds one value per completion."""


@dataclass(frozen=True)
class StepScores:
    """The values of the steps of one completion, and where each step ends.

    ``ends[k]`` is the offset in characters just after step k: ``completion[: ends[k]]`` is the text up to and including
    step k, prefilled text included. Offsets count characters because rewards know no tokenizer; the trainer maps step k
    to the token that holds its last character, ``completion[ends[k] - 1]``.

    Raises:
        ValueError: ``values`` and ``ends`` differ in length, ends are not positive and increasing, or a value is not
            finite.
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

    ``value`` is ``None`` exactly when the completion is not to blame (``bad_gold``, ``unavailable``); such a sample is
    left out of the baseline and the loss. What the completion caused itself (``timeout``, ``crashed``, …) is 0.
    """

    value: float | None
    status: Status
    detail: str = ""
    steps: StepScores | None = None
    """The values of the steps, from a `ProcessReward`; None from any other reward."""
    turns: tuple[float, ...] | None = None
    """The part of each turn of an episode in ``value``, from a reward that scores turns; None credits the last turn."""

    def __post_init__(self) -> None:
        if not self.detail.isascii():  # it may quote a lone surrogate, which no file takes
            object.__setattr__(self, "detail", self.detail.encode(errors="replace").decode())

    @classmethod
    def of(cls, value: float, detail: str = "", *, steps: StepScores | None = None) -> Score:
        """A completion that was judged: ``ok`` for a value of 1 or more, ``wrong`` for a lower one."""
        return cls(value, "ok" if value >= 1.0 else "wrong", detail, steps)

    @property
    def correct(self) -> bool | None:
        """True for a ``value`` of 1 or more; None if it is None."""
        return None if self.value is None else self.value >= 1.0

    def to_dict(self) -> dict[str, Any]:
        """``value``, ``status`` and ``detail``, as written to tables, files and replies of the server."""
        return {"value": self.value, "status": self.status, "detail": self.detail}


class MissingColumn(ValueError):
    """The rows lack a column that a reward needs, or the column holds a value that the reward cannot use."""


class RewardFailed(RuntimeError):
    """A reward raised an exception or returned no valid scores, on any rank.

    The message names the reward, the line that raised, and the checkpoint from which the run can be resumed.
    """

    last_checkpoint: Path | None = None
    """Checkpoint of the state after the last completed rollout; None before the first one."""

    def __str__(self) -> str:
        saved = self.last_checkpoint and f". Saved: {self.last_checkpoint}; --resume goes on once it is mended."
        return super().__str__() + (saved or "")


@dataclass(kw_only=True, init=False, repr=False, eq=False)  # a subclass that is no dataclass keeps its own constructor
class Reward(ABC):
    """Scores a batch of completions.

    A subclass is a ``@dataclass(kw_only=True)``: its fields and the ones below are its arguments in YAML. It gives
    ``name`` a default.
    """

    trusted: ClassVar[bool] = False
    """True for a reward of this package that an export or a run folder of somebody else may name without
    ``--trust-rewards``: it imports nothing by name, uses no network, loads no model and opens no file. Each class of
    `grpo_pl.rewards` says so for itself; in classes elsewhere, it has no effect."""
    reads_form: ClassVar[bool] = False
    """True if a bare gold answer is no completion that it could score, as one that reads steps or programs."""
    name: str
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right (pass@k, majority, ``expected``). Without
    one no answer is right or wrong, and held-out problems are measured by the rewards."""
    on_error: str = field(default="raise", init=False)
    """Reaction to a call of the reward that raises. ``raise``: the run saves its last rollout and ends; ``none``:
    every completion of the call scores None with status ``unavailable``."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of columns that not every run has: ``completion_length`` (tokens per completion) and
        ``completion_ids`` (their ids), computed only if a reward asks for them, and ``episode`` (action, observation
        and reward of each turn), which is always given where an environment is played. By default what the rewards
        among its arguments need."""
        return needs_of(held_by(self))

    @property
    def asynchronous(self) -> bool:
        """True if it mostly waits for I/O, such as a server's reply; it then runs at the same time as the other
        rewards. By default True if one of the rewards among its arguments is asynchronous."""
        return any(reward.asynchronous for reward in held_by(self))

    @abstractmethod
    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        """Scores ``completions[i]`` (prefilled text such as ``<think>`` included) against ``answers[i]``.

        Args:
            completions: the texts that the policy wrote.
            answers: one gold answer per completion.
            columns: further columns of the data set, each as long as ``completions``; always holds ``prompt``,
                the rendered prompt text.

        Returns:
            One score per completion, in order.

        Raises:
            MissingColumn: a column is missing, or holds a value that this reward cannot use.
        """

    def stated_answers(self, completions: Sequence[str], columns: Columns) -> list[str]:
        r"""The answer of each completion as it could stand in a gold answer's place, for majority votes: by default the
        last ``\boxed{…}``, else the last ``<answer>``, else all of the text."""
        return list(map(stated_answer, completions))

    def check(self) -> None:
        """Refuses what this machine cannot do, before a run starts; by default, asks the rewards among its arguments.

        Raises:
            ValueError: what is missing here, and what to do.
        """
        for reward in held_by(self):
            reward.check()

    def start(self) -> None:
        """Starts worker processes now instead of on first use; by default, starts the rewards among its arguments."""
        for reward in held_by(self):
            reward.start()

    def close(self) -> None:
        """Ends worker processes and closes connections; by default, closes the rewards among its arguments."""
        for reward in held_by(self):
            reward.close()

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        """The fault of each gold answer, in order; ``""`` if completions can be judged against it, which is the default
        for all."""
        return [""] * len(golds)

    def init_args(self) -> dict[str, Any]:
        """The arguments that rebuild this reward, as JSON types; an export of the model stores them.

        Raises:
            TypeError: the class is not a dataclass.
        """
        maker = next(kind for kind in type(self).__mro__ if "__init__" in vars(kind))
        if "__dataclass_params__" not in vars(maker):
            raise TypeError(f"{type(self).__name__} is not a dataclass: make it one, or override init_args().")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {name: _described(value) for name, value in values.items()}

    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, as a configuration file holds them; the path of a reward that
        `grpo_pl.rewards` exports does not name the file in which it is defined."""
        kind = type(self)
        exported = getattr(sys.modules["grpo_pl.rewards"], kind.__qualname__, None) is kind
        module = "grpo_pl.rewards" if exported else kind.__module__
        return {"class_path": f"{module}.{kind.__qualname__}", "init_args": self.init_args()}


class PerCompletionReward(Reward):
    """Scores each completion on its own with `score`; None with ``bad_gold`` where `gold_faults` finds a fault."""

    @abstractmethod
    def score(self, completion: str, gold: str) -> Score:
        """The score of one completion; `gold_faults` has found no fault in ``gold``."""

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        rows = zip(completions, answers, self.gold_faults(answers), strict=True)
        return [Score(None, "bad_gold", fault) if fault else self.score(text, gold) for text, gold, fault in rows]


class TextAnswerReward(PerCompletionReward):
    """A reward that compares with the text of the gold answer: an empty or blank one is ``bad_gold``."""

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold.strip() else "empty" for gold in golds]


def not_judged(answer: str, longest: int) -> Score | None:
    """The score of an answer that is missing, or has more than ``longest`` characters; None if it is to be judged."""
    if not answer:
        return Score(0.0, "no_answer")
    return Score(0.0, "too_long", f"{len(answer)} characters") if len(answer) > longest else None


def correctness_index(rewards: Sequence[Reward]) -> int | None:
    """The index of the reward with ``correctness: true``; None without one."""
    return next((index for index, reward in enumerate(rewards) if reward.correctness), None)


def require_correctness(rewards: Sequence[Reward], purpose: str) -> int:
    """The index of the reward with ``correctness: true``.

    Args:
        purpose: what asks for it, the beginning of the error's sentence.

    Raises:
        ValueError: there is none.
    """
    index = correctness_index(rewards)
    if index is None:
        raise ValueError(f"{purpose} needs a reward with `correctness: true`, which says what a right answer is.")
    return index


def needs_of(rewards: Iterable[Reward]) -> frozenset[str]:
    """The union of `Reward.needs` over ``rewards``."""
    return frozenset().union(*(reward.needs for reward in rewards))


def held_by(value: Any) -> Iterator[Reward]:
    """The rewards among the arguments of a reward, or among the items of a list or mapping, at any depth of lists and
    mappings; not those that these rewards hold."""
    if isinstance(value, Reward):
        arguments = [getattr(value, f.name, None) for f in fields(value)]
    else:
        arguments = list(value.values()) if isinstance(value, Mapping) else list(value)
    for argument in arguments:
        if isinstance(argument, Reward):
            yield argument
        elif isinstance(argument, Mapping | list | tuple):
            yield from held_by(argument)


def with_inner(rewards: Iterable[Reward]) -> Iterator[Reward]:
    """The rewards, each followed by those that it holds, and those that these hold."""
    for reward in rewards:
        yield reward
        yield from with_inner(held_by(reward))


def _described(value: Any) -> Any:
    """``value`` with every reward in it, at any depth, replaced by its ``spec``."""
    if isinstance(value, Reward):
        return value.spec()
    if isinstance(value, Mapping):
        return {key: _described(inner) for key, inner in value.items()}
    return [_described(inner) for inner in value] if isinstance(value, list | tuple) else value
