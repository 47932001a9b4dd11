"""``GenerateAPI``: the process that holds the model and decodes all requests in one continuous batch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litserve import LitAPI
from litserve.specs.base import LitSpec

from grpo_pl.policy.trained import ServedModel
from grpo_pl.rewards.sandbox.worker_environment import MODEL, worker_environment
from grpo_pl.rollout.native.continuous import ContinuousBatch, Drawn, SequenceOptions, batch_of
from grpo_pl.types import FinishReason
from serve.grammars import Grammar, GrammarError, GrammarMask, Grammars
from serve.worker import Mailbox, Refusal, WorkerLoop, end_with_parent

log = logging.getLogger(__name__)

_GRAMMAR = "response_format"
_DIVERGED = "the policy's logits are not finite: its weights have diverged."
_FLUSH_S = 0.02  # tokens of a live request are sent this often: each message costs both sides more than a token does


class Generate(NamedTuple):
    """Draw one completion per key."""

    prompt_ids: list[int]
    keys: list[int]
    options: SequenceOptions
    live: bool
    """Send tokens as they come, not only at the end."""
    grammar: Grammar | None = None
    """What the completions must match."""
    evaluation: bool = False
    """Join the batch one prompt a token: a crowd that joins at once would hold up everyone's next token."""


class ScorePrompt(NamedTuple):
    """Tell the log-probabilities of a prompt's own tokens, and the ``top`` likeliest at each place."""

    prompt_ids: list[int]
    top: int


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
    def __init__(self, uid: str, job: Generate, sequences: list[int], masks: Sequence[GrammarMask]) -> None:
        self.uid, self.job, self.masks = uid, job, masks
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

    def environment(self) -> dict[str, str]:
        """The variables that the process gets; see ``Server.launch_inference_worker``."""
        return worker_environment(MODEL)

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
        self._aside: deque[tuple[str, Generate | ScorePrompt]] = deque()  # a turn between two tokens each
        self._compiling: dict[str, tuple[Generate, Future[Any]]] = {}
        while True:
            self._take_requests(mailbox)
            self._take_turns(mailbox)
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
        from grpo_pl.policy.loading import eos_ids

        self._grammars = Grammars(self._served.tokenizer, eos_ids(self._model, self._served.tokenizer))
        return batch_of(self._served, self._model, self.max_batch_size)

    def _take_requests(self, mailbox: Mailbox) -> None:
        busy = len(self._batch) or self._aside or self._compiling
        while (item := mailbox.take(wait_for_one=not busy)) is not None:
            busy = True
            uid, payload = item
            if isinstance(payload, Cancel):
                mailbox.forget(uid)
                self._cancel(payload, mailbox)
            elif isinstance(payload, ScorePrompt) or payload.evaluation:
                self._aside.append((uid, payload))
            elif payload.grammar is not None:
                self._compiling[uid] = (payload, self._grammars.compile(payload.grammar))
            else:
                self._start(uid, payload, mailbox)

    def _take_turns(self, mailbox: Mailbox) -> None:
        """Work that must not keep the running completions waiting: one prompt a token, and grammars when ready."""
        for uid, (job, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[uid]
                try:
                    masks = Grammars.masks(compiled.result(), len(job.keys))
                except GrammarError as error:
                    mailbox.fail(uid, Refusal(f"the grammar cannot be used: {error}.", _GRAMMAR, "invalid_value"))
                except Exception:  # a library read what a client wrote: whatever it trips over is not the server's end
                    log.exception("a grammar failed; its request is answered with 500")
                    mailbox.fail(uid, "compiling the grammar failed; the server's log has the details.")
                else:
                    self._start(uid, job, mailbox, masks)
        if self._aside:
            uid, payload = self._aside.popleft()
            if isinstance(payload, ScorePrompt):
                self._score(uid, payload, mailbox)
            else:
                self._start(uid, payload, mailbox)
        elif self._compiling and not len(self._batch):
            time.sleep(0.001)

    def _score(self, uid: str, job: ScorePrompt, mailbox: Mailbox) -> None:
        try:
            scored = self._batch.prompt_logprobs(job.prompt_ids, top=job.top)
        except Exception:  # as in decoding: one request is lost, the server is not
            log.exception("scoring a prompt failed; its request is answered with 500")
            mailbox.fail(uid, "scoring the prompt failed; the server's log has the details.")
            return
        if all(math.isfinite(token.logprob) for token in scored if token.logprob is not None):
            mailbox.answer(uid, scored, last=True)
        else:
            mailbox.fail(uid, _DIVERGED)

    def _start(self, uid: str, job: Generate, mailbox: Mailbox, masks: Sequence[GrammarMask] = ()) -> None:
        try:
            sequences = self._batch.add(job.prompt_ids, job.keys, job.options, masks or None)
        except ValueError as error:
            mailbox.fail(uid, str(error))
            return
        request = self._requests[uid] = _Request(uid, job, sequences, masks)
        self._owner.update(dict.fromkeys(sequences, request))

    def _cancel(self, cancel: Cancel, mailbox: Mailbox) -> None:
        request = self._requests.get(cancel.uid)
        if request is None:  # it has ended meanwhile, or not begun
            if self._compiling.pop(cancel.uid, None) is not None:
                mailbox.forget(cancel.uid)
            for waiting in [item for item in self._aside if item[0] == cancel.uid]:
                self._aside.remove(waiting)
                mailbox.forget(cancel.uid)
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
            mailbox.fail(request.uid, _why_nothing_is_left(request))
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


def _why_nothing_is_left(request: _Request) -> str | Refusal:
    """What to say about a request whose log-probabilities are not finite."""
    grammar = next((mask.error for mask in request.masks if mask.error), "")
    if grammar:
        return Refusal(f"the grammar is too complex to follow: {grammar}", _GRAMMAR, "invalid_value")
    if request.masks or request.job.options.logits is not None:
        message = "bad_words, min_tokens and the grammar exclude every token: nothing is left to draw."
        return Refusal(message, None, "invalid_value")
    return _DIVERGED
