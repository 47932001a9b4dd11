"""``ScoreWorker``: holds the rewards and their sandbox; it has no model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple

from grpo_pl.config.objects import build_rewards
from grpo_pl.processes.variables import clean_environment
from grpo_pl.rewards.base import MissingColumn, Reward, correctness_index
from grpo_pl.rewards.batch import score_completions
from grpo_pl.rewards.sandbox.task_queue import CALLER, Caller
from grpo_pl.rewards.voting import answer_classes
from serve.worker_channel import Answer, Cancel, Failure, FrontChannel, InvalidRequest, WorkerTask

log = logging.getLogger(__name__)

_THREADS = 256  # requests scored at the same time, more than max_queue is by default: in the sandbox they take turns
_SLICE = 64  # completions per call of the rewards, or one group; other rewards end between calls when a client has gone
_SHOWN = 1000  # characters of an extracted answer


class ScoreItems(NamedTuple):
    """Request to score ``completions[i]`` against ``answers[i]``."""

    completions: list[str]
    answers: Sequence[str | None]
    columns: Mapping[str, list[Any]]
    group_size: int = 0
    """Completions per problem, which are neighbours: their answers are also numbered for majority votes. 0: no
    groups."""


class ScoreWorker(WorkerTask):
    """Takes :class:`ScoreItems` and ``Cancel``; answers with the scores of all rewards."""

    def __init__(self, rewards: Sequence[Mapping[str, Any]], *, trust_rewards: bool = False) -> None:
        self._specs, self._trusted = rewards, trust_rewards

    def environment(self) -> dict[str, str]:
        """The environment variables of the process; trusted rewards get all, as they may need the key of a judge."""
        return dict(os.environ) if self._trusted else clean_environment()

    def prepare(self) -> None:
        CALLER.set(Caller())  # so that pools start with what several callers need
        self._rewards = build_rewards(self._specs, trust_rewards=self._trusted)
        for reward in self._rewards:
            reward.check()
            reward.start()

    def work(self, front: FrontChannel) -> None:
        callers: dict[int, Caller] = {}
        try:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="score") as threads:
                while True:
                    for uid, payload in front.take(wait_for_one=True):
                        if not isinstance(payload, Cancel):
                            callers[uid] = Caller()
                            threads.submit(copy_context().run, self._answer, uid, payload, front, callers)
                        elif (caller := callers.get(uid)) is not None:  # its thread may remove it at any time
                            caller.leave()
        finally:
            for reward in self._rewards:
                reward.close()

    def _answer(self, uid: int, job: ScoreItems, front: FrontChannel, callers: dict[int, Caller]) -> None:
        caller = callers[uid]
        CALLER.set(caller)
        try:
            items: list[dict[str, Any]] = []
            step = job.group_size or _SLICE
            for first in range(0, len(job.completions), step):
                if caller.gone:
                    return
                items += score_items(self._rewards, job, slice(first, first + step))
            front.send(Answer(uid, items))
        except MissingColumn as error:  # a fault of the request
            front.send(Failure(uid, InvalidRequest(str(error))))
        except CancelledError:  # nobody waits for an answer
            pass
        except Exception as error:  # a reward may be a user's code: only this request fails
            log.exception("a reward failed")
            reason = f"a reward failed: {type(error).__name__}; the server's log has the details."
            front.send(Failure(uid, reason))
        finally:
            del callers[uid]


def score_items(rewards: Sequence[Reward], job: ScoreItems, part: slice) -> list[dict[str, Any]]:
    """Scores the completions of ``part`` of a job, which covers whole groups if it has groups.

    Returns:
        Per completion: weighted sum, status and verdict of the correctness reward, the answer that it read (at most
        ``_SHOWN`` characters; None for no answer, or all of the text), scores of all rewards, with groups its answer
        class, and the time of the call in ms.

    Raises:
        MissingColumn: a column that a reward needs is missing.
        Exception: whatever a reward raises, see ``score_completions``.
    """
    began = time.perf_counter()
    completions = job.completions[part]
    columns = {name: column[part] for name, column in job.columns.items()}
    scored = score_completions(rewards, completions=completions, answers=job.answers[part], columns=columns)
    place = correctness_index(rewards)
    judge = rewards[place or 0]  # without a correctness reward it only tells where it would look for an answer
    stated, correct, classes = judge.stated_answers(completions, columns), scored.correct(), list[int]()
    if job.group_size:
        classes = answer_classes(
            judge, completions=completions, scores=scored.judged(), columns=columns, group_size=job.group_size
        )
    milliseconds = round((time.perf_counter() - began) * 1000, 3)
    items = []
    for row, (score, total, answer) in enumerate(zip(scored.judged(), scored.totals(), stated, strict=True)):
        said = answer.strip()
        is_part = place is not None and score.status != "no_answer" and said not in ("", completions[row].strip())
        items.append(
            {
                "value": total,
                "status": score.status,
                "correct": correct[row],
                "rewards": scored.described(row),
                "extracted": said[:_SHOWN] if is_part else None,
                **({"answer_class": classes[row]} if job.group_size else {}),
                "ms": milliseconds,
            }
        )
    return items
