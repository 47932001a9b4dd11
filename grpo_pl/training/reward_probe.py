"""Calls every reward once before a run starts, so that a faulty one shows in its first seconds and not in a rollout."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.collective import failure_line
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.processes.child_process import exit_name
from grpo_pl.processes.resource_limits import kill_with_parent
from grpo_pl.rewards.background import in_thread
from grpo_pl.rewards.base import Reward, needs_of, with_inner
from grpo_pl.rewards.batch import score_one
from grpo_pl.rewards.function import FunctionReward
from grpo_pl.rewards.logged_extras import LoggedExtras
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import trainer_state
from grpo_pl.types import Problem, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBLEMS = 2
LIMIT_S = 10.0
"""Seconds for all rewards together; what is left then is not called."""
LEAVES_WITHIN_S = 1.0
"""Longest wait for a process that has tried a reward."""
JUNK = "qwertz 0 ]{"
_NO_GPU = "Cannot re-initialize CUDA in forked subprocess"  # torch's words
T = TypeVar("T")


class _NotTried(Exception):
    """There is no result, and why, in the words that follow the reward's name."""


class _Raised(Exception):
    """The traceback of a reward that was tried, maybe in another process."""


class _Fault(NamedTuple):
    """What a reward raised, in one line and with its traceback."""

    line: str
    trace: str


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
    called if they say ``check_remote``. Rewards and functions of users are called in a process that is forked from this
    one and ends with the call, so that nothing they keep here changes.

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
        if any(not getattr(part, "check_remote", True) for part in parts):  # of a model
            continue
        if time.monotonic() >= until:
            say(f"Rewards from {reward.name!r} on are not tried before the start: the others took {LIMIT_S:g} s.")
            return
        junk_only = plays or any(part.reads_form for part in parts)
        texts = [[JUNK] if junk_only else [JUNK, _right(problem, source)] for problem in problems]
        texts = [list(islice(cycle(row), i, i + group_size)) for i, row in enumerate(texts)]
        samples = text_samples(
            problems, [[template.prefill + text for text in row] for row in texts], template, tokenizer
        )
        of_user = any(isinstance(part, FunctionReward) or not _is_ours(type(part).__module__) for part in parts)
        call = partial(_fault, reward, samples, plays)
        try:
            if of_user:
                fault = _forked(call, until)
            elif reward.asynchronous:
                fault = _within(call, until)
            else:
                fault = call()  # has limits of its own
        except _NotTried as why:
            say(f"reward {reward.name!r} {why}")
            continue
        if fault is not None:
            raise ValueError(
                f"reward {reward.name!r} failed before the start, on {len(samples.completions)} texts that try it: "
                f"{fault.line}"
            ) from _Raised(fault.trace)


def _right(problem: Problem, source: PromptSource) -> str:
    shown = source.demonstration(problem, random.Random(row_key("probe", problem.id)))
    return rf"\boxed{{{problem.answer}}}" if shown is None else shown


def _fault(reward: Reward, samples: Samples, plays: bool) -> _Fault | None:
    """Why the reward fails; None where it does not."""
    golds = [problem.answer for problem in samples.per_row]
    extras = LoggedExtras(len(samples.completions), partial(trainer_state, 0, 1, 0), kept=False)
    try:
        columns = samples.columns(needs_of([reward]))
        if plays:
            columns["episode"] = list(map(_episode, samples.completions))
        with extras.collect():
            score_one(reward, samples.completions, golds, columns)
    except Exception as error:  # a user's reward may raise anything
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        ours = _is_ours(str(frame.f_globals.get("__name__", "")))  # wrong scores or columns: our line helps nobody
        line = " ".join((str(error) if ours else failure_line(error)).split())
        return _Fault(line, "".join(traceback.format_exception(error)))
    return None


def _is_ours(module: str) -> bool:
    return module.startswith("grpo_pl.")


def _within(call: Callable[[], T], until: float) -> T:
    """The result of a call that waits for others, if it is there in time."""
    if not wait([future := in_thread(call)], until - time.monotonic()).done:
        raise _NotTried(f"was not waited for: texts that try it took until {LIMIT_S:g} s had passed.")
    return future.result()


def _forked(call: Callable[[], _Fault | None], until: float) -> _Fault | None:
    """The result of ``call()`` in a forked process, which is killed with what it started when the time is up."""
    context = multiprocessing.get_context("fork")
    try:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(call, theirs), name="reward probe")
        process.start()
    except OSError as error:
        raise _NotTried(f"is not tried before the start: no process could be forked ({error}).") from error
    try:
        theirs.close()
        connection.wait([ours, process.sentinel], max(0.0, until - time.monotonic()))
        with suppress(EOFError, OSError):  # it died, or closed what is not its own
            if ours.poll():
                fault: _Fault | None = ours.recv()
                process.join(LEAVES_WITHIN_S)
                if fault is not None and _NO_GPU in fault.trace:
                    raise _NotTried("is not tried before the start: it needs the GPU, which no forked process can use.")
                return fault
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            raise _NotTried(
                f"was interrupted: texts that try it took until {LIMIT_S:g} s had passed. If it loads something, load "
                "that when its module is imported; a thread of its module does not run in the process that tries it."
            )
        raise _NotTried(f"has no result: the process that tried it ended by {exit_name(process.exitcode or 0)}.")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(int(process.pid or 0), signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def _tell(call: Callable[[], _Fault | None], parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.setpgid(0, 0)  # programs that it starts end with it
    kill_with_parent()
    torch.set_num_threads(1)  # OpenMP's threads are not those of a forked process
    parent.send(call())


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
    own = [template.without_opened_thought(text, tokenizer).removeprefix(template.prefill) for text in texts]
    ended = [[*tokenizer(text, add_special_tokens=False).input_ids, *end_of_text(tokenizer)] for text in own]
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
