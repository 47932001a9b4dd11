"""Calls every reward once before a run starts, so that a faulty one shows in its first seconds and not in a rollout."""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.collective import failure_line
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.background import in_thread
from grpo_pl.rewards.base import Reward, held_by, needs_of, with_inner
from grpo_pl.rewards.batch import score_one
from grpo_pl.rewards.endpoint import AsksModel
from grpo_pl.rewards.function import FunctionReward
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
CANCELLING_S = 1.0
"""Further seconds for a coroutine that is cancelled."""
JUNK = "qwertz 0 ]{"

_Place = tuple[Any, str, Any]
"""A variable: what holds it, its name there, its value."""
_ABSENT = object()


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
    group_size: int,
    plays: bool,
    say: Callable[[str], None],
) -> None:
    r"""Calls each reward with junk and with right answers: the source's demonstration, or ``\boxed{gold}``. Programs,
    process rewards, and all rewards where an environment is played get junk only. Rewards that ask or load a model are
    called if they say ``check_remote``. Rewards and functions of users are called on copies of their variables, which
    hold the objects of before again afterwards; if one cannot be copied, there is no call, and a line says so.

    Args:
        group_size: texts for each problem.
        plays: an environment is played, so rewards get the column ``episode``.

    Raises:
        ValueError: a reward raised an exception, returned other than one finite value or None for each completion, or
            lacks a column; one line that names the reward and its function.
    """
    until = time.monotonic() + LIMIT_S
    for reward in rewards:
        parts = list(with_inner([reward]))
        if any(isinstance(part, AsksModel | LoadsModel) and not part.check_remote for part in parts):
            continue
        if (left := until - time.monotonic()) <= 0.0:
            say(f"Rewards from {reward.name!r} on are not tried before the start: the others took {LIMIT_S:g} s.")
            return
        junk_only = plays or any(isinstance(part, ProcessReward | CodeReward) for part in parts)
        texts = [[JUNK] if junk_only else [JUNK, _right(problem, source)] for problem in problems]
        texts = [list(islice(cycle(row), i, i + group_size)) for i, row in enumerate(texts)]
        samples = text_samples(
            problems, [[template.prefill + text for text in row] for row in texts], template, tokenizer
        )
        try:
            _try(reward, parts, samples, plays, until)
        except _Uncopyable as error:
            say(f"reward {reward.name!r} is not tried before the start: {error}, so it could not be put back.")
        except _TooLong:
            say(
                f"reward {reward.name!r} was interrupted: {len(samples.completions)} texts that try it took more than "
                f"{left:.0f} s. If it loads something, load that when its module is imported."
            )
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


def _right(problem: Problem, source: PromptSource) -> str:
    shown = source.demonstration(problem, random.Random(row_key("probe", problem.id)))
    return rf"\boxed{{{problem.answer}}}" if shown is None else shown


def _try(reward: Reward, parts: Sequence[Reward], samples: Samples, plays: bool, until: float) -> None:
    columns = samples.columns(needs_of([reward]))
    if plays:
        columns["episode"] = list(map(_episode, samples.completions))
    golds = [problem.answer for problem in samples.per_row]
    called = _called(parts)
    extras = LoggedExtras(len(samples.completions), partial(trainer_state, 0, 1, 0), kept=False)
    with extras.collect(), _random_states_kept():
        if not called:
            call = partial(score_one, reward, samples.completions, golds, columns)
            if not reward.asynchronous:
                call()  # has limits of its own
            elif not wait([future := in_thread(call)], until - time.monotonic()).done:
                raise _TooLong
            else:
                future.result()
            return
        memo: dict[int, Any] = {}  # one for all, so that what two variables hold stays one object
        with _time_limit(until):
            places, classes = _variables(called, memo)
            copies = [_copied(value, f"{name!r} of its function", memo) for _, name, value in places]
            tried = _copied(reward, "its state", memo)
        tries = list(with_inner([tried]))
        for part in tries:
            if isinstance(part, FunctionReward) and part.asynchronous:
                part._call = partial(_awaited, part._call, until)
        # a coroutine is cancelled first, so that what it does at its end is undone as well
        grace = CANCELLING_S if tried.asynchronous else 0.0
        try:
            with _bound(places, copies, classes), _time_limit(until + grace):
                score_one(tried, samples.completions, golds, columns)
        finally:
            for part in tries:  # a user's `close` may remove what the original needs
                if type(part).close.__module__.startswith("grpo_pl.") and not list(held_by(part)):
                    part.close()


async def _awaited(call: Callable[..., Any], until: float, /, **arguments: Any) -> Any:
    limit = asyncio.timeout(until - time.monotonic())
    try:
        async with limit:
            return await call(**arguments)
    except TimeoutError:
        if limit.expired():
            raise _TooLong from None
        raise


def _called(parts: Sequence[Reward]) -> list[Any]:
    """What users wrote among the parts of a reward: what a ``FunctionReward`` calls, and classes."""
    calls = [part._call for part in parts if isinstance(part, FunctionReward)]
    return calls + [type(part) for part in parts if not type(part).__module__.startswith("grpo_pl.")]


def _copied(value: Any, what: str, memo: dict[int, Any]) -> Any:
    if isinstance(getattr(type(value), "__del__", None), FunctionType):
        raise _Uncopyable(f"the end of a copy of {what} would run __del__")
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # of a user's object, which may refuse in any way
        raise _Uncopyable(f"{what} cannot be copied ({' '.join(str(error).split())[:80]})") from error


@contextmanager
def _bound(places: Sequence[_Place], copies: Sequence[Any], classes: Mapping[type, frozenset[str]]) -> Iterator[None]:
    """Context manager: variables hold copies; at its end they hold the objects of before again, and new ones go."""
    try:
        for (holder, name, value), twin in zip(places, copies, strict=True):
            if twin is not value:
                _bind(holder, name, twin)
        yield
    finally:
        for holder, name, value in places:
            if not isinstance(holder, type) or vars(holder).get(name, _ABSENT) is not value:
                _bind(holder, name, value)
        for kind, before in classes.items():
            for name in vars(kind).keys() - before:
                if not name.startswith("__"):
                    delattr(kind, name)


def _bind(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        if value is _ABSENT:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is _ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def _variables(called: Sequence[Any], memo: dict[int, Any]) -> tuple[list[_Place], dict[type, frozenset[str]]]:
    """The variables that functions, objects and classes can change, as far as their modules define them.

    Args:
        memo: of ``deepcopy``; gets what is not copied, wherever it is held: models, which are large, and bare objects,
            which are told from others by their identity.

    Returns:
        (holder, name, value) of each: global variables that their code, and the code of their module that it calls, has
        a name for (`_ABSENT` without a value), variables of closures, attributes and defaults of functions, attributes
        of classes; and the classes with the names of their attributes.
    """
    memo[id(_ABSENT)] = _ABSENT
    own = set(map(_home, called))
    places: list[_Place] = []
    classes: dict[type, frozenset[str]] = {}
    todo, seen = list(called), dict[int, Any]()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        held: list[_Place] = []
        if isinstance(thing, partial):
            todo.append(thing.func)
        elif isinstance(thing, MethodType):
            todo += [thing.__func__, thing.__self__]
        elif isinstance(thing, staticmethod | classmethod):
            todo.append(thing.__func__)
        elif isinstance(thing, property):
            todo += [thing.fget, thing.fset]
        elif isinstance(thing, type):
            for kind in thing.__mro__:
                if kind.__module__ in own and kind not in classes:
                    classes[kind] = frozenset(vars(kind))
                    held += [(kind, name, value) for name, value in vars(kind).items() if name != "_abc_impl"]
        elif isinstance(thing, FunctionType):
            todo.append(getattr(thing, "__wrapped__", None))
            if (scope := thing.__globals__).get("__name__") in own:
                places += [
                    (thing, name, getattr(thing, name)) for name in ("__defaults__", "__kwdefaults__", "__dict__")
                ]
                held += [(scope, name, scope.get(name, _ABSENT)) for name in _names(thing.__code__)]
                for cell in thing.__closure__ or ():
                    try:
                        held.append((cell, "cell_contents", cell.cell_contents))
                    except ValueError:  # it has no value yet
                        places.append((cell, "cell_contents", _ABSENT))
        else:
            todo += [type(thing), inspect.getattr_static(thing, "__wrapped__", None)]
        todo += [value for _, _, value in held]
        memo.update((id(value), value) for _, _, value in held if type(value) is object or isinstance(value, nn.Module))
        places += [place for place in held if _is_state(*place)]
    return places, classes


def _home(called: Any) -> str:
    """The name of the module that defines a function, class or object."""
    while isinstance(called, partial | MethodType):
        called = called.func if isinstance(called, partial) else called.__func__
    called = called if isinstance(called, type) else inspect.unwrap(called)
    if isinstance(called, FunctionType):
        return str(called.__globals__.get("__name__"))
    return str((called if isinstance(called, type) else type(called)).__module__)


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_state(holder: Any, name: str, value: Any) -> bool:
    """False for what no call changes, such as code; even a constant's variable may be bound to another value."""
    if isinstance(holder, type) and (name.startswith("__") or hasattr(type(value), "__get__")):
        return False
    return not isinstance(value, ModuleType | FunctionType | BuiltinFunctionType | type)


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
def _time_limit(until: float) -> Iterator[None]:
    """Context manager that raises `_TooLong` at the time ``until``, in a main thread; elsewhere nothing can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooLong

    if (seconds := until - time.monotonic()) <= 0.0:
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
