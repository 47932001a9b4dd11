"""``RewardAPI``: a LitAPI whose worker holds the rewards of a model and their sandbox; ``/v1/score`` asks it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from grpo_pl.config.objects import build_rewards, closed_rewards
from grpo_pl.functional.argument_checks import check_at_least, check_positive
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.policy.trained import ServedModel
from grpo_pl.processes.variables import clean_environment
from grpo_pl.rewards.base import MissingColumn, needs_of
from grpo_pl.rewards.sandbox.task_queue import CALLER, Caller
from grpo_pl.rewards.score_items import ScoreItems, score_items
from serve.bodies import in_thread, large_json_response
from serve.calls import Deadline, QueueFull, WorkerSpec
from serve.errors import bad_request, check_model
from serve.messages import Answer, Cancel, Failure
from serve.metrics import ServerMetrics
from serve.schemas import ScoreRequest
from serve.scoring import group_objective
from serve.streaming import while_connected
from serve.worker import Mailbox, Origin, WorkerAPI

log = logging.getLogger(__name__)

SCORE = "/v1/score"
_THREADS = 256  # requests scored at the same time, more than max_queue is by default: in the sandbox they take turns
_SLICE = 64  # completions per call of the rewards, or one group; other rewards end between calls when a client has gone
_LONGEST, _TOGETHER = 1 << 17, 1 << 20  # characters to tokenise, per text and in all: each takes 500 bytes of memory


class RewardAPI(WorkerAPI):
    """Scores completions with the rewards of a trained policy, in ``grpo-pl serve`` or a LitServer of your own.
    Requests are scored at the same time and take turns in the sandbox.

    Args:
        model: an exported folder, a run folder, or a checkpoint of a run.
        max_queue: requests that may be in progress; further ones get 429.
        deadline: seconds after which an unfinished request gets 504.
        trust_rewards: as in ``grpo-pl serve``.

    Raises:
        ValueError: there is no model, or a reward cannot be built; or a limit is not positive.
    """

    def __init__(
        self,
        model: str | Path | ServedModel,
        *,
        max_queue: int = 128,
        deadline: float = 120.0,
        trust_rewards: bool = False,
    ) -> None:
        check_at_least(1, type(self).__name__, max_queue=max_queue)
        check_positive(deadline=deadline)
        super().__init__(model, trust_rewards=trust_rewards)
        self.spec = RewardSpec(self.model, deadline=deadline, max_queue=max_queue)
        self.stream = True

    def environment(self) -> dict[str, str]:
        """Trusted rewards get all variables, as they may need the key of a judge."""
        return dict(os.environ) if self.model.trust_rewards else clean_environment()

    def prepare(self, device: str) -> None:
        CALLER.set(Caller())  # so that pools start with what several callers need
        self._rewards = build_rewards(self.model.rewards, trust_rewards=self.model.trust_rewards)
        for reward in self._rewards:
            reward.check()
            reward.start()

    def work(self, mailbox: Mailbox) -> None:
        def end(*_: Any) -> None:
            for reward in self._rewards:
                reward.close()
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        callers: dict[Origin, Caller] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="score") as threads:
            while True:
                for origin, payload in mailbox.take(wait_for_one=True):
                    if not isinstance(payload, Cancel):
                        callers[origin] = Caller()
                        threads.submit(copy_context().run, self._answer, origin, payload, mailbox, callers)
                    elif (caller := callers.get(origin)) is not None:  # its thread may remove it at any time
                        caller.leave()

    def _answer(self, origin: Origin, job: ScoreItems, mailbox: Mailbox, callers: dict[Origin, Caller]) -> None:
        caller = callers[origin]
        CALLER.set(caller)
        try:
            items: list[dict[str, Any]] = []
            step = job.group_size or _SLICE
            for first in range(0, len(job.completions), step):
                if caller.gone:
                    return
                items += score_items(self._rewards, job, slice(first, first + step))
            mailbox.tell(origin, Answer(origin.uid, items))
        except MissingColumn as error:  # a fault of the request
            mailbox.tell(origin, Failure(origin.uid, str(error), 400, "items", "missing_column"))
        except CancelledError:  # nobody waits for an answer
            pass
        except Exception as error:  # a reward may be a user's code: only this request fails
            log.exception("a reward failed")
            reason = f"a reward failed: {type(error).__name__}; the server's log has the details."
            mailbox.tell(origin, Failure(origin.uid, reason))
        finally:
            del callers[origin]


class RewardSpec(WorkerSpec):
    """The route ``/v1/score``, and scoring for ``/v1/evaluate``."""

    def __init__(self, model: ServedModel, *, deadline: float, max_queue: int) -> None:
        super().__init__(SCORE, deadline=deadline, max_queue=max_queue)
        self.model, self.metrics = model, ServerMetrics()
        self.built = closed_rewards(model.rewards, trust_rewards=model.trust_rewards)
        """The rewards, closed: the worker has its own."""
        self._needs, self._objective = needs_of(self.built), group_objective(model.algorithm)
        self._asking = 0
        self._one_at_a_time = asyncio.Semaphore(1)  # prepares columns, to bound the memory that this takes
        self.add_route(SCORE, ScoreRequest, self._score)

    async def _score(self, body: ScoreRequest, request: Request) -> Response:
        check_model(body.model, self.model.name)
        if self._asking >= self.max_queue:
            raise QueueFull(self._asking)
        self._asking += 1
        try:
            scored = await while_connected(request, self._scored(body))
        finally:
            self._asking -= 1
        self.metrics.count_scores(scored)
        return await large_json_response(lambda: self._objective.group(scored) if body.group else {"items": scored})

    async def _scored(self, body: ScoreRequest) -> list[Any]:
        deadline = Deadline(self.deadline)
        items = [{**item.__dict__, **(item.model_extra or {})} for item in body.items]
        try:
            async with asyncio.timeout(deadline.left()), self._one_at_a_time:
                columns = await in_thread(self._columns, items)
        except TimeoutError:
            raise deadline.passed() from None
        completions, answers = ([item[name] for item in items] for name in ("completion", "answer"))
        return list(await self.ask(ScoreItems(completions, answers, columns), deadline=deadline))

    def _columns(self, items: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """All further fields of the items as columns, and those of training that the client does not give."""
        names = sorted({name for item in items for name in item} - {"completion", "answer"})
        columns: dict[str, list[Any]] = {name: [item.get(name) for item in items] for name in names}
        questions = [item.get("question", item.get("problem", "")) for item in items]
        columns.setdefault("question", questions)
        render, tokenizer = self.model.template.render, self.model.tokenizer
        prompts = [render(asked, tokenizer) if asked and isinstance(asked, str) else "" for asked in questions]
        columns.setdefault("prompt", prompts)
        if missing := self._needs - columns.keys():
            tokens = self._tokens([item["completion"] for item in items], missing)
            filled: dict[str, list[Any]] = {"completion_ids": tokens, "completion_length": [len(ids) for ids in tokens]}
            columns |= {name: filled[name] for name in missing & filled.keys()}
        return columns

    def _tokens(self, completions: Sequence[str], missing: Collection[str]) -> list[list[int]]:
        """The tokens that the policy would have written, the end token included."""
        longest, total = max(map(len, completions)), sum(map(len, completions))
        if longest > _LONGEST or total > _TOGETHER:
            message = (
                f"a reward reads {' and '.join(sorted(missing))}, for which completions may have {_LONGEST:,} "
                f"characters, {_TOGETHER:,} together: send less at once, or give these fields with the items."
            )
            raise bad_request("items", message, code="too_long")
        tokenizer, template = self.model.tokenizer, self.model.template
        drawn = (
            template.without_opened_thought(text, tokenizer).removeprefix(template.prefill) for text in completions
        )
        texts = (text.encode("utf-8", "replace").decode() for text in drawn)
        return [[*tokenizer(text, add_special_tokens=False).input_ids, *end_of_text(tokenizer)] for text in texts]
