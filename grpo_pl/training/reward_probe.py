"""Calls every reward once before a run starts, so that a faulty one shows in its first seconds and not in a rollout."""

from __future__ import annotations

import copy
import inspect
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.collective import failure_line
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.background import in_thread
from grpo_pl.rewards.base import Reward, held_by, needs_of
from grpo_pl.rewards.batch import score_one
from grpo_pl.rewards.endpoint import AsksModel
from grpo_pl.rewards.function import FunctionReward, load_function
from grpo_pl.rewards.logged_extras import LoggedExtras
from grpo_pl.rewards.model import LoadsModel
from grpo_pl.rewards.process import ProcessReward
from grpo_pl.rewards.programs.code_reward import CodeReward
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import trainer_state
from grpo_pl.types import Problem, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBLEMS = 2
LIMIT_S = 10.0
"""Seconds for all rewards together; what is left then is not called."""
JUNK = "qwertz 0 ]{"


class _TooLong(BaseException):
    """The time is up; a user's ``except Exception`` must not catch it."""


class _Uncopyable(Exception):
    """A state that cannot be put back."""


def probe_rewards(
    rewards: Sequence[Reward],
    problems: Sequence[Problem],
    source: PromptSource,
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    *,
    plays: bool,
    say: Callable[[str], None],
) -> None:
    r"""Calls each reward with junk and with a right answer to each problem: the source's demonstration, or
    ``\boxed{gold}``. Programs, process rewards, and all rewards where an environment is played get junk only. Rewards
    that ask or load a model are called if they say ``check_remote``. The state of rewards and functions of others is
    that of before, afterwards; one that cannot be copied is not called, and a line says so.

    Args:
        plays: an environment is played, so rewards get the column ``episode``.

    Raises:
        ValueError: a reward raised an exception, returned other than one finite value or None for each completion, or
            lacks a column; one line that names the reward and its function.
    """
    until = time.monotonic() + LIMIT_S
    for reward in rewards:
        parts = [reward, *_nested(reward)]
        if any(isinstance(part, AsksModel | LoadsModel) and not part.check_remote for part in parts):
            continue
        if (left := until - time.monotonic()) <= 0.0:
            say(f"Rewards from {reward.name!r} on are not tried before the start: the others took {LIMIT_S:g} s.")
            return
        junk_only = plays or any(isinstance(part, ProcessReward | CodeReward) for part in parts)
        texts = [[JUNK] if junk_only else [JUNK, _right(problem, source)] for problem in problems]
        samples = text_samples(
            problems, [[template.prefill + text for text in row] for row in texts], template, tokenizer
        )
        try:
            _try(reward, parts, samples, plays, left)
        except _Uncopyable as error:
            say(f"reward {reward.name!r} is not tried before the start: {error}, so it could not be put back.")
        except _TooLong:
            say(f"reward {reward.name!r} took more than {left:.0f} s for {len(samples.completions)} completions.")
        except Exception as error:  # a user's reward may raise anything
            told = str(error) if _is_ours(error) else failure_line(error)  # a line of ours helps nobody
            raise ValueError(
                f"reward {reward.name!r} failed before the start, on {len(samples.completions)} texts that try it: "
                f"{' '.join(told.split())}"
            ) from error


def _is_ours(error: Exception) -> bool:
    """True for what this package found wrong with a reward's scores or columns."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("grpo_pl.")


def _nested(reward: Reward) -> Iterator[Reward]:
    for inner in held_by(reward):
        yield inner
        yield from _nested(inner)


def _right(problem: Problem, source: PromptSource) -> str:
    shown = source.demonstration(problem, random.Random(row_key("probe", problem.id)))
    return rf"\boxed{{{problem.answer}}}" if shown is None else shown


def _try(reward: Reward, parts: Sequence[Reward], samples: Samples, plays: bool, seconds: float) -> None:
    columns = samples.columns(needs_of([reward]))
    if plays:
        columns["episode"] = list(map(_episode, samples.completions))
    golds = [problem.answer for problem in samples.per_row]
    functions = _functions_of(parts)
    extras = LoggedExtras(len(samples.completions), partial(trainer_state, 0, 1, 0), kept=False)
    with extras.collect(), _random_states_kept(), _variables_kept(functions):
        tried = _copied(reward) if functions else reward
        call = partial(score_one, tried, samples.completions, golds, columns)
        try:
            if tried.asynchronous:
                future = in_thread(call)
                if not wait([future], seconds).done:
                    raise _TooLong
                future.result()
            elif functions:
                with _time_limit(seconds):
                    call()
            else:
                call()  # has limits of its own
        finally:
            if tried is not reward:
                tried.close()


def _copied(reward: Reward) -> Reward:
    try:
        return copy.deepcopy(reward)
    except Exception as error:  # of a user's object, which may refuse in any way
        raise _Uncopyable(f"its state cannot be copied ({' '.join(str(error).split())[:80]})") from error


@contextmanager
def _variables_kept(functions: Sequence[FunctionType]) -> Iterator[None]:
    """Context manager: the variables that these functions can change are put back: those of their modules, of closures,
    and their attributes."""
    kept: list[tuple[Any, Any, Any, Any]] = []  # holder, name, value, its copy
    for holder, name, value in (place for function in functions for place in _variables(function)):
        try:
            kept.append((holder, name, value, copy.deepcopy(value)))
        except Exception as error:  # a user's object may refuse in any way
            raise _Uncopyable(f"{name or 'a variable'!r} of its function cannot be copied ({error})") from error
    try:
        yield
    finally:
        for holder, name, value, before in kept:
            if isinstance(holder, CellType):
                holder.cell_contents = _refilled(value, before)
            else:
                holder[name] = _refilled(value, before)


def _variables(function: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, value) of the variables that a function, or one of its module that it calls, has a name for."""
    scope, seen, todo = function.__globals__, set[CodeType](), [function.__code__]
    yield from ((vars(function), name, value) for name, value in vars(function).items() if _is_state(value))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            if isinstance(cell.cell_contents, FunctionType):
                yield from _variables(cell.cell_contents)
            elif _is_state(cell.cell_contents):
                yield cell, "", cell.cell_contents
    names: dict[str, None] = {}
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            value = scope.get(name)
            if isinstance(value, FunctionType) and value.__globals__ is scope:
                todo.append(value.__code__)
            elif name in scope and _is_state(value):
                names[name] = None
    yield from ((scope, name, scope[name]) for name in names)


def _is_state(value: Any) -> bool:
    """False for code, which nobody changes: modules, classes and what can be called."""
    return not isinstance(value, ModuleType) and not callable(value)


def _refilled(value: Any, before: Any) -> Any:
    """``before``, or ``value`` with its content where that is a container, which others may hold as well."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    else:
        return before
    return value


def _functions_of(parts: Sequence[Reward]) -> list[FunctionType]:
    """The functions of users among the parts of a reward: of a ``FunctionReward``, and methods of classes of theirs."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, FunctionReward):
            called = load_function(part.function) if isinstance(part.function, str) else part.function
            while isinstance(called, partial):
                called = called.func
            found += [inspect.unwrap(called)] if isinstance(called, FunctionType) else vars(type(called)).values()
            found.append(getattr(called, "__func__", None))
        elif not type(part).__module__.startswith("grpo_pl."):
            found += vars(type(part)).values()
    return [function for function in found if isinstance(function, FunctionType)]


@contextmanager
def _random_states_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")  # where somebody uses it
    python, tensors = random.getstate(), torch.get_rng_state()
    numbers = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(tensors)
        if numpy is not None:
            numpy.random.set_state(numbers)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context manager that raises `_TooLong` when the time is up, in a main thread; elsewhere nothing can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _episode(text: str) -> Mapping[str, Any]:
    """The column ``episode`` of one turn that earned nothing."""
    turn = {"action": text, "observation": "", "reward": 0.0, "invalid_action": False, "finish_reason": "environment"}
    told = {"return": 0.0, "status": "ok", "detail": "", "finish_reason": "environment", "observation": ""}
    return {**told, "turns": [turn]}


def text_samples(
    problems: Sequence[Problem],
    rows: Sequence[Sequence[str]],
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
) -> Samples:
    """Equally many given texts for each problem, prefill included, as if a policy had written them."""
    texts = [text for row in rows for text in row]
    ids = [tokenizer(text.removeprefix(template.prefill), add_special_tokens=False).input_ids for text in texts]
    ended = [[*row, int(tokenizer.eos_token_id)] for row in ids]
    flipped, mask = pad_left([row[::-1] for row in ended], int(tokenizer.pad_token_id))
    rollout = Rollout(
        group_size=len(rows[0]),
        prompt_ids=torch.zeros(len(texts), 1, dtype=torch.int64),
        prompt_mask=torch.ones(len(texts), 1, dtype=torch.bool),
        completion_ids=flipped.flip(1),
        completion_mask=mask.flip(1),
        sampling_logprobs=torch.zeros(mask.shape),
        finish_reasons=["stop"] * len(texts),
    )
    return Samples(
        prompts=problems,
        prompt_texts=[template.render(problem.asked, tokenizer) for problem in problems],
        rollout=rollout,
        completions=texts,
        step=0,
    )
