"""What a policy acts in, turn by turn: ``Environment``, ``Transition``, the checked result of a turn, and limits."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_pl.functional.argument_checks import check_positive
from grpo_pl.functional.exact_sums import weighted_sum

Conversation = Sequence[Mapping[str, Any]]
"""Chat messages: ``role`` and ``content``, a text; what else they hold is for the chat template."""
Observation = str | Conversation
Step = tuple[Observation, float, bool, bool, Mapping[str, Any]]
"""Observation, reward, terminated, truncated, info: what ``Environment.step`` returns."""
Status = Literal[
    "ok",
    "policy",  # the action broke the environment's rules beyond repair: it raised PolicyFault
    "timeout",  # a step took longer than the pool's limit
    "raised",  # a step raised an exception
    "killed",  # the process of the environment ended
    "too_long",  # an observation is larger than the pool's limit
    "malformed",  # an observation of a wrong type, a reward that is no finite number, a state that names nothing
    "unavailable",  # a server could not be reached, or a process not be started
    "rewritten",  # an agent's call does not continue the conversation that it had before
    "no_reward",  # an agent that gives the reward ended without one
]
_LARGEST_REWARD = 1e30  # sums over the turns of an episode must stay numbers
Blame = Literal["environment", "policy"]
Player = Callable[[Sequence["Transition"]], str | None]
"""The next action after all that has happened, the reset first; None where it gives up."""


class EnvironmentMistake(ValueError):
    """An environment returned what is none of an environment's values; one line that says which and what."""


class PolicyFault(Exception):
    """Raised by an environment whose episode cannot go on for a fault of the action; the reward so far counts."""


class EpisodeEnded(Exception):
    """Raised by an environment that knows itself what went wrong, and for whose fault."""

    def __init__(self, status: Status, detail: str, blame: Blame) -> None:
        super().__init__(detail)
        self.status, self.detail, self.blame = status, detail, blame


class Unavailable(RuntimeError):
    """Raised by an environment that depends on something outside, which could not be reached."""


@dataclass(kw_only=True)
class Environment(ABC):
    """One episode at a time, in Gymnasium's terms. Subclass as a ``@dataclass(kw_only=True)``: its fields are settings.

    An instance from a configuration is a prototype: each episode plays in its own copy, from :meth:`fresh`. All the
    episodes of a group get the same seed and row, so that nothing but the policy tells them apart: whatever is random
    must come from ``seed`` alone.
    """

    isolation: Literal["thread", "process"] = "process"
    """Play each episode in a process of its own, which can be killed; or in a thread, for code that is
    known to return and keeps no state outside its instances."""
    blame: Blame = "environment"
    """The one at fault when a step hangs, raises or dies: after ``environment`` the episode has no value and leaves the
    loss; after ``policy``, for steps that run what the policy wrote, the rewards so far are its value."""

    @abstractmethod
    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        """Begins an episode.

        Args:
            seed: what everything random must be derived from, 0 … 2³² - 1.
            row: the columns of the prompt, with ``question`` and ``answer`` among them.

        Returns:
            The first observation, which follows the question (empty adds nothing), and an info as of :meth:`step`.
        """

    @abstractmethod
    def step(self, action: str) -> Step:
        """Plays one turn.

        Args:
            action: what the policy wrote, special tokens left out.

        Returns:
            ``(observation, reward, terminated, truncated, info)``; ``terminated`` ends the episode by its own rules,
            ``truncated`` by a limit. An observation is a text or a list of chat messages. Of ``info`` the pipeline
            reads ``state``, a text, number or tuple that names where the *next* action is taken (by default the
            observation is that name), and ``invalid_action``, whether the action meant nothing here.
        """

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Releases what an episode holds; called once, also after a fault."""

    def prepare(self) -> None:  # noqa: B027 - most environments know nothing before
        """Imports what episodes need, and refuses settings that cannot work; called before the first episode.

        Raises:
            ValueError: what is wrong, in one line.
        """

    def fresh(self) -> Environment:
        """A new environment with the same settings, for one episode."""
        return dataclasses.replace(self)

    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, as a configuration file holds them; functions by their names.

        Raises:
            ValueError: a function that has no name another process could import.
        """
        return described(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its settings: functions found by a text are found again where it is unpickled."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return functools.partial(type(self), **settings), ()

    def finish(self) -> float:
        """The reward that is still due when a limit of the pipeline, on turns or tokens, ends the episode here."""
        return 0.0

    def tasks(self) -> Iterable[Mapping[str, Any]]:
        """The tasks that it brings along, for ``EnvironmentPrompts``: columns of plain values, each with a text
        ``question`` that tells it from others, and an ``answer`` where there is one; asked for after :meth:`prepare`.

        Raises:
            ValueError: they cannot be listed; why, in one line.
        """
        return ()

    def shutdown(self) -> None:  # noqa: B027 - most environments prepare nothing that lasts
        """Ends what :meth:`prepare` started; called once no episode is left."""

    @property
    def slowest_step_s(self) -> float:
        """Seconds that a step may take by the environment's own limits, which must end first; 0 where it has none."""
        return 0.0

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that a chat template tells the policy about."""
        return ()

    @property
    def told_tools(self) -> str:
        """The system message's text about ``tool_schemas``, where the chat template has no place for them."""
        return listed(self.tool_schemas)

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the prompt that :meth:`reset` cannot do without; a run without them does not start."""
        return ()

    @property
    def interpreter(self) -> str:
        """The Python in which episodes with processes of their own are played; empty: that of the training."""
        return ""

    @property
    def passed(self) -> Sequence[str]:
        """Names of variables of the training's environment that the processes of its episodes get."""
        return ()

    @property
    def writes_prompt(self) -> bool:
        """True if :meth:`reset` returns the whole prompt, as messages, and in ``info`` its ``tools`` and their text
        ``told_tools``; the question is not asked otherwise. ``info["max_tokens"]`` and the texts in
        ``info["stop"]`` then end the next action, and :meth:`step` is told how the action was drawn (``drawn``), and
        its text in front of such a stop. ``info["segment"]`` is the number of the conversation
        that the observation continues, 0 by default; the next number that is free begins one, whose observation and
        info are as those of a reset."""
        return False

    @property
    def pays(self) -> bool:
        """False if its episodes have no reward of their own, so that their return says nothing."""
        return True

    @property
    def observation_role(self) -> str:
        """The role of the messages that observations come as; the chat template is tried with it before a run."""
        return "user"


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The checked result of a reset or a step."""

    observation: Observation = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    state: str = ""
    """Names where the next action is taken; equal for equal states on every machine."""
    invalid_action: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "ok"
    detail: str = ""
    """The fault, in one line."""
    blame: Blame | None = None
    """Whose fault it was; None unless the status says that something went wrong."""

    @property
    def done(self) -> bool:
        """True once the episode is over."""
        return self.terminated or self.truncated or self.status != "ok"


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Limits of the episodes of a pool."""

    step_timeout_s: float = 30.0
    """Seconds of the clock that a step may take."""
    reset_timeout_s: float = 60.0
    """Seconds that the start of an episode may take, that of its process included."""
    max_observation_chars: int = 32_768
    """Longest observation; a longer one ends its episode."""
    memory_limit_mb: int = 2048
    """Address space that the process of an episode may add to what it begins with (``RLIMIT_AS``)."""
    threads: int = 8
    """Steps that run at the same time where episodes share this process."""

    def __post_init__(self) -> None:
        check_positive(**{field.name: getattr(self, field.name) for field in dataclasses.fields(PoolLimits)})

    def of(self, method: str) -> float:
        """Seconds that ``reset`` or ``step`` may take."""
        return self.reset_timeout_s if method == "reset" else self.step_timeout_s


def attempted(call: Callable[..., Any], arguments: Mapping[str, Any], *, where: str, blame: Blame) -> Transition:
    """The transition that a reset or step leads to, whatever it raises or returns.

    Args:
        call: the method.
        where: its name, ``reset``, ``step`` or ``finish``.
        blame: whose fault an exception is, except that of a reset, which is always the environment's.
    """
    try:
        returned = call(**arguments)
        if where == "finish":
            return read_step(("", returned, False, True, {}), where)
        return read_reset(returned) if where == "reset" else read_step(returned)
    except PolicyFault as fault:
        return failed("policy", str(fault), blame="policy")
    except EpisodeEnded as end:
        return failed(end.status, end.detail, blame=end.blame)
    except EnvironmentMistake as mistake:
        return failed("malformed", str(mistake), blame="environment")
    except Unavailable as absence:
        return failed("unavailable", str(absence), blame="environment")
    except (Exception, SystemExit) as error:  # somebody else's code may raise anything; it must not end a run
        detail = f"{where} raised {type(error).__name__}: {error}"
        return failed("raised", detail, blame="environment" if where == "reset" else blame)


def described(value: Any) -> Any:
    """Settings as plain values: objects as ``class_path`` and ``init_args``, functions as what `resolved` takes."""
    from grpo_pl.rewards.function import reference_of

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        settings = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": settings}
    if isinstance(value, Mapping):
        return {key: described(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    return reference_of(value) if callable(value) else value


def resolved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """A function given by itself, as ``package.module:function`` or as ``file.py:function``; a file is run once.

    Raises:
        ValueError: no such function.
    """
    return _loaded(function, Path.cwd()) if isinstance(function, str) else function


@functools.cache
def _loaded(reference: str, folder: Path) -> Callable[..., Any]:
    """The function of a reference, which may be relative to ``folder``."""
    from grpo_pl.rewards.function import load_function

    return load_function(reference)


def failed(status: Status, detail: str, *, blame: Blame) -> Transition:
    """The transition of an episode that ends because something went wrong."""
    return Transition(truncated=True, status=status, detail=" ".join(detail.split())[:500], blame=blame)


def read_reset(returned: Any) -> Transition:
    """Reads the result of ``Environment.reset``.

    Raises:
        EnvironmentMistake: it is not what reset should return.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise EnvironmentMistake(f"reset must return (observation, info), got {_shown(returned)}.")
    return read_step((returned[0], 0.0, False, False, returned[1]), "reset")


def read_step(returned: Any, where: str = "step") -> Transition:
    """Reads the result of ``Environment.step``.

    Raises:
        EnvironmentMistake: it is not what step should return.
    """
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise EnvironmentMistake(
            f"step must return (observation, reward, terminated, truncated, info), got {_shown(returned)}."
        )
    observation, reward, terminated, truncated, info = returned
    _check_observation(observation, where)
    try:
        value = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= _LARGEST_REWARD:
        raise EnvironmentMistake(
            f"{where} returned the reward {_shown(reward)}: a finite number is needed, of {_LARGEST_REWARD:g} at most."
        )
    if not isinstance(info, Mapping):
        raise EnvironmentMistake(f"{where} returned the info {_shown(info)}: a mapping is needed.")
    return Transition(
        observation=observation if isinstance(observation, str) else [dict(message) for message in observation],
        reward=value,
        terminated=bool(terminated),
        truncated=bool(truncated),
        state=state_name(info["state"]) if "state" in info else text_of(observation),
        invalid_action=bool(info.get("invalid_action", False)),
        info={key: value for key, value in info.items() if key not in ("state", "invalid_action")},
    )


def _check_observation(observation: Any, where: str) -> None:
    messages = [{"role": "", "content": observation}] if isinstance(observation, str) else observation
    messages = messages if isinstance(messages, list | tuple) else None
    if messages is None or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise EnvironmentMistake(
            f"{where} returned the observation {_shown(observation)}: a text is needed, or a list of messages with "
            "role and content."
        )
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError as error:
        raise EnvironmentMistake(
            f"{where} returned the observation {_shown(observation)}: {error.object[error.start]!r} stands for bytes "
            "that are no text (decode them with errors='replace')."
        ) from error


def listed(tools: Iterable[Mapping[str, Any]]) -> str:
    """JSON schemas of tools, one a line."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def text_of(observation: Observation) -> str:
    """An observation as plain text: its messages one below the other."""
    return observation if isinstance(observation, str) else "\n".join(str(m["content"]) for m in observation)


def state_name(state: Hashable) -> str:
    """``state`` as text: equal exactly for equal states, in every process.

    Raises:
        EnvironmentMistake: it is not made of texts, numbers, booleans, None and tuples or frozen sets of them.
    """
    return state if isinstance(state, str) else _canonical(state)


def _canonical(state: Any) -> str:
    if hasattr(state, "item") and getattr(state, "shape", None) == ():  # a number of NumPy
        state = state.item()
    if isinstance(state, float) and state.is_integer():  # equal to an int, and hashed like one
        state = int(state)
    if state is None or isinstance(state, str | bytes | int | float):
        return repr(int(state) if isinstance(state, bool) else state)
    if isinstance(state, tuple):
        return f"({', '.join(map(_canonical, state))})"
    if isinstance(state, frozenset):
        return f"{{{', '.join(sorted(map(_canonical, state)))}}}"
    raise EnvironmentMistake(
        f'info["state"] is {_shown(state)}: name a state with a text, numbers, or a tuple of such (of an array: '
        "tuple(array.tolist()))."
    )


def episode_value(transitions: Iterable[Transition]) -> float | None:
    """Σ_t r_t of the turns of an episode; None where a turn failed for no fault of the policy."""
    turns = list(transitions)
    if any(turn.blame == "environment" for turn in turns):
        return None
    return weighted_sum([turn.reward for turn in turns], [1.0] * len(turns))


def play(
    environment: Environment, actions: Iterable[str] | Player, *, seed: int = 0, row: Mapping[str, Any] | None = None
) -> list[Transition]:
    """Plays actions in this process until they or the episode end: the reset's transition, then one an action.

    For demonstrations and for trying an environment out: nothing is limited, and errors reach the caller.

    Args:
        actions: one after the other, or a function that chooses the next.

    Raises:
        EnvironmentMistake: the environment returned what is none of an environment's values.
    """
    episode, given = environment.fresh(), None if callable(actions) else iter(actions)
    try:
        turns = [read_reset(episode.reset(seed=seed, row=row or {}))]
        while not turns[-1].done:
            action = next(given, None) if given is not None else actions(turns)  # type: ignore[operator]
            if action is None:
                break
            turns.append(read_step(episode.step(action)))
    finally:
        episode.close()
    return turns


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # somebody else's __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"
