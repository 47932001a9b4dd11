"""``GenerateAPI``: the process that holds the model and decodes all requests in one continuous batch."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from litserve import LitAPI
from litserve.specs.base import LitSpec

from grpo_pl.rollout.continuous import ContinuousBatch, Drawn, SequenceOptions
from grpo_pl.types import FinishReason
from serve.served import ServedModel
from serve.worker import Mailbox, WorkerLoop, end_with_parent

log = logging.getLogger(__name__)

_FLUSH_S = 0.02  # tokens of a live request are sent this often: each message costs both sides more than a token does


class Generate(NamedTuple):
    """Draw one completion per key."""

    prompt_ids: list[int]
    keys: list[int]
    options: SequenceOptions
    live: bool
    """Send tokens as they come, not only at the end."""


class Cancel(NamedTuple):
    """Stop the request's completions of these indices."""

    uid: str
    indices: list[int]


@dataclass
class Chunk:
    """New tokens of one completion of a request."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, drawn: Drawn, *, with_top: bool) -> None:
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if with_top:
            self.top.append(drawn.top)
        self.finish = drawn.finish


class _Request:
    def __init__(self, uid: str, job: Generate, sequences: list[int]) -> None:
        self.uid, self.job = uid, job
        self.index = {sequence: i for i, sequence in enumerate(sequences)}  # of those that are still going
        self.pending: dict[int, Chunk] = {}
        self.flushed_at = -math.inf  # the first token goes out at once


class GenerateAPI(LitAPI):
    """LitServe's view of the worker; the routes live in the front process."""

    def __init__(self, model: ServedModel, *, device: str, max_batch_size: int, spec: LitSpec) -> None:
        super().__init__(max_batch_size=max_batch_size, spec=spec, loop=WorkerLoop())
        self._served, self._target = model, device

    def authorize(self) -> None:
        """Keys are checked around all routes (``serve.guard``); this keeps LIT_SERVER_API_KEY from locking some."""

    def setup(self, device: str) -> None:
        import torch

        end_with_parent()
        if self._target == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # one core answers HTTP
        self._model = self._served.load_policy(self._target)
        self._batch = self._new_batch()

    def work(self, mailbox: Mailbox) -> None:
        self._requests: dict[str, _Request] = {}
        self._owner: dict[int, _Request] = {}  # by sequence
        while True:
            self._take_requests(mailbox)
            if not len(self._batch):
                continue
            try:
                drawn = self._batch.step()
            except Exception:  # one batch is lost, the server is not: the model's own faults are beyond control here
                log.exception("decoding failed; its requests are answered with 500")
                self._fail_all(mailbox)
                continue
            self._hand_out(drawn, mailbox)

    def _new_batch(self) -> ContinuousBatch:
        return self._served.new_batch(self._model, self.max_batch_size)

    def _take_requests(self, mailbox: Mailbox) -> None:
        while (item := mailbox.take(wait_for_one=not len(self._batch))) is not None:
            uid, payload = item
            if isinstance(payload, Cancel):
                mailbox.forget(uid)
                self._cancel(payload, mailbox)
                continue
            try:
                sequences = self._batch.add(payload.prompt_ids, payload.keys, payload.options)
            except ValueError as error:
                mailbox.fail(uid, str(error))
                continue
            request = self._requests[uid] = _Request(uid, payload, sequences)
            self._owner.update(dict.fromkeys(sequences, request))

    def _cancel(self, cancel: Cancel, mailbox: Mailbox) -> None:
        request = self._requests.get(cancel.uid)
        if request is None:  # it has ended meanwhile
            return
        gone = [sequence for sequence, i in request.index.items() if i in cancel.indices]
        self._batch.remove(gone)
        for sequence in gone:
            del self._owner[sequence], request.index[sequence]
        for i in cancel.indices:
            request.pending.pop(i, None)
        if not request.index:
            mailbox.answer(request.uid, list(request.pending.values()), last=True)
            del self._requests[request.uid]

    def _hand_out(self, drawn: list[Drawn], mailbox: Mailbox) -> None:
        touched: dict[str, _Request] = {}
        broken: dict[str, _Request] = {}
        for d in drawn:
            request = self._owner[d.sequence]
            i = request.index[d.sequence]
            request.pending.setdefault(i, Chunk(i)).add(d, with_top=request.job.options.top_logprobs > 0)
            touched[request.uid] = request
            if d.finish is not None:
                del request.index[d.sequence], self._owner[d.sequence]
            if not math.isfinite(d.logprob):
                broken[request.uid] = request
        for request in broken.values():
            self._drop(request)
            mailbox.fail(request.uid, "the policy's logits are not finite: its weights have diverged.")
        now = time.monotonic()
        for uid, request in touched.items():
            if uid in broken:
                continue
            last = not request.index
            if last or (request.job.live and now - request.flushed_at >= _FLUSH_S):
                mailbox.answer(uid, list(request.pending.values()), last=last)
                request.pending, request.flushed_at = {}, now
            if last:
                del self._requests[uid]

    def _drop(self, request: _Request) -> None:
        self._batch.remove(list(request.index))
        for sequence in request.index:
            del self._owner[sequence]
        del self._requests[request.uid]

    def _fail_all(self, mailbox: Mailbox) -> None:
        for uid in self._requests:
            mailbox.fail(uid, "decoding failed; the server's log has the details.")
        self._requests.clear()
        self._owner.clear()
        self._batch = self._new_batch()
