"""``PolicyAPI``: a LitAPI whose worker holds the model and decodes all requests in one continuous batch."""

from __future__ import annotations

import heapq
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_pl.functional.argument_checks import check_at_least, check_positive
from grpo_pl.policy.inputs import inputs_of_bytes
from grpo_pl.policy.trained import ServedModel
from grpo_pl.processes.variables import MODEL, clean_environment
from grpo_pl.rollout.grammars import CompiledGrammar, Grammars, Unusable
from grpo_pl.rollout.native.continuous import ContinuousBatch, Drawn, batch_of
from grpo_pl.rollout.processors import TokenMask
from grpo_pl.rollout.thinking import ThoughtMask
from serve.completions import PolicySpec
from serve.follow import Follower, NewWeights
from serve.messages import Answer, Cancel, Draw, Drew, Failure, Followed, Part, ScorePrompt
from serve.worker import Mailbox, Origin, WorkerAPI

log = logging.getLogger(__name__)

_STEP_S = 0.01
"""Seconds after which a step is to end: requests join and leave between two steps."""
_MOST_TOKENS = 16
"""Most tokens that a sequence gets in one step."""
_DIVERGED = "the policy's logits are not finite: its weights have diverged."


class PolicyAPI(WorkerAPI):
    """Answers OpenAI's chats and completions with a trained policy, in ``grpo-pl serve`` or a LitServer of your own.

    Args:
        model: an exported folder, a run folder, or a checkpoint of a run.
        max_completions: completions decoded at once.
        max_queue: requests that may wait for a slot of the batch; further ones get 429.
        deadline: seconds after which an unfinished request gets 504.
        trust_rewards: as in ``grpo-pl serve``.
        follow: load every newer checkpoint of the run that ``model`` belongs to.

    Raises:
        ValueError: there is no model, or it cannot be served; or a limit is not positive.
    """

    def __init__(
        self,
        model: str | Path | ServedModel,
        *,
        max_completions: int = 64,
        max_queue: int = 128,
        deadline: float = 120.0,
        trust_rewards: bool = False,
        follow: bool = False,
    ) -> None:
        check_at_least(1, type(self).__name__, max_completions=max_completions, max_queue=max_queue)
        check_positive(deadline=deadline)
        super().__init__(model, trust_rewards=trust_rewards)
        self.spec = PolicySpec(self.model, size=max_completions, deadline=deadline, max_queue=max_queue)
        self.stream = True
        self.size, self._follow = max_completions, follow

    def environment(self) -> dict[str, str]:
        return clean_environment(MODEL)

    def prepare(self, device: str) -> None:
        if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # leaves one core to the HTTP process
        self._weights = NewWeights.load(self.model, device)

    def work(self, mailbox: Mailbox) -> None:
        if self._follow:
            Follower(self.model, self._weights.policy.device, mailbox.wake).start()
        Decoding(self.model, self._weights, self.size, mailbox).run()


@dataclass(eq=False)
class _Request:
    """A request whose completions wait or are drawn."""

    origin: Origin
    job: Draw
    waiting: deque[int]
    """Indices of completions that have no slot yet."""
    running: dict[int, int] = field(default_factory=dict)
    """Index -> sequence in the batch."""
    grammar: CompiledGrammar | None = None
    has_begun: bool = False
    """True once a completion has had a slot."""


class Decoding:
    """The batch of one model, and the requests in it and in line for it; runs in the worker's one thread."""

    def __init__(self, model: ServedModel, weights: NewWeights, size: int, mailbox: Mailbox) -> None:
        self._model, self._size, self._mailbox = model, size, mailbox
        self._grammars = Grammars(model.tokenizer, weights.eos)
        self._requests: dict[Origin, _Request] = {}
        self._line: dict[Origin, _Request] = {}  # those with completions that wait, in the order of arrival
        self._scoring: deque[tuple[Origin, ScorePrompt]] = deque()  # one is handled per step
        self._owners: dict[int, tuple[_Request, int]] = {}  # by sequence: whose, and the index of its completion
        self._most_tokens = 1  # in the next step
        self._newer: NewWeights | None = None
        self._use(weights)

    def _use(self, weights: NewWeights) -> None:
        self._weights, self._version = weights, weights.model.version
        self._batch = self._new_batch()

    def _new_batch(self) -> ContinuousBatch:
        return batch_of(replace(self._model, precision=self._weights.model.precision), self._weights.policy, self._size)

    def run(self) -> None:
        while True:
            busy = len(self._batch) or self._line or self._scoring or self._newer
            for origin, message in self._mailbox.take(wait_for_one=not busy):
                self._receive(origin, message)
            self._fill()
            self._score_one()
            if len(self._batch):
                self._step()

    def _receive(self, origin: Origin, message: Any) -> None:
        if isinstance(message, Draw):
            request = _Request(origin, message, deque(range(message.size)))
            self._requests[origin] = request
            if message.grammar is None:
                self._line[origin] = request
            else:
                self._grammars.compile(message.grammar, lambda told: self._mailbox.wake(_Compiled(request, told)))
        elif isinstance(message, _Compiled):
            self._enter_compiled(message)
        elif isinstance(message, ScorePrompt):
            self._scoring.append((origin, message))
        elif isinstance(message, Cancel):
            self._cancel(origin, message.indices)
        elif isinstance(message, NewWeights):
            self._newer = message
        elif isinstance(message, Followed):
            self._mailbox.tell(origin, message)

    def _enter_compiled(self, message: _Compiled) -> None:
        request, grammar = message.request, message.request.job.grammar
        if self._requests.get(request.origin) is not request or grammar is None:
            return  # cancelled meanwhile
        if isinstance(message.told, CompiledGrammar):
            request.grammar = message.told
            self._line[request.origin] = request
        else:
            self._fail(request, f"{grammar.field}: {message.told}", 400, grammar.field, "invalid_value")

    # --- joining ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Gives free slots to the requests with fewest completions in the batch, the earliest first."""
        free = self._size - len(self._batch)
        if not free:
            return
        line = list(self._line.values())
        if self._newer is not None:  # a request that has begun ends with the weights with which it began
            line = [request for request in line if request.has_begun]
            if not line and not len(self._batch):
                self._use(self._newer)
                self._newer = None
                self._mailbox.tell(Origin(0, -1), Followed(self._version))
                line = list(self._line.values())
        granted: Counter[_Request] = Counter()
        heap = [(len(request.running), i, request) for i, request in enumerate(line)]
        heapq.heapify(heap)
        while heap and granted.total() < free:
            has, i, request = heapq.heappop(heap)
            granted[request] += 1
            if granted[request] < len(request.waiting):
                heapq.heappush(heap, (has + 1, i, request))
        for request, slots in granted.items():
            self._join(request, [request.waiting.popleft() for _ in range(slots)])

    def _join(self, request: _Request, indices: Sequence[int]) -> None:
        """Lets completions of a request join the batch, those of one prompt together."""
        request.has_begun = True
        n = len(request.job.parts[0].keys)
        try:
            for p, mine in groupby(indices, lambda i: i // n):
                part, places = request.job.parts[p], list(mine)
                keys = [part.keys[i % n] for i in places]
                masks = self._masks(request, part, len(keys))
                inputs = None if part.inputs is None else inputs_of_bytes(part.inputs)
                sequences = self._batch.add(part.prompt_ids, keys, part.options, masks, inputs=inputs)
                for i, sequence in zip(places, sequences, strict=True):
                    request.running[i], self._owners[sequence] = sequence, (request, i)
        except (ValueError, Unusable) as error:
            self._fail(request, str(error))
        except Exception:  # the model's own code may fail: this request is lost, the server goes on
            log.exception("a prompt could not join the batch; its request is answered with 500")
            self._fail(request, "the prompt could not be read; the server's log has the details.")
        else:
            if not request.waiting:
                del self._line[request.origin]

    def _masks(self, request: _Request, part: Part, count: int) -> list[TokenMask] | None:
        if request.grammar is not None:
            return [request.grammar.mask() for _ in range(count)]
        if not isinstance(budget := part.options.sampling.thinking_budget, int):
            return None
        end = self._model.template.thought_of(self._model.tokenizer)
        return [ThoughtMask(end, budget) for _ in range(count)]

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Draws the next tokens of every sequence."""
        began = time.perf_counter()
        try:
            drawn = self._batch.step(self._most_tokens)
        except Exception:  # the model's own code may fail: this batch is lost, the server goes on
            log.exception("decoding failed; its requests are answered with 500")
            for request in {request for request, _ in self._owners.values()}:
                self._fail(request, "decoding failed; the server's log has the details.")
            self._batch = self._new_batch()
            return
        self._hand_out(drawn)
        if drawn:
            token_s = (time.perf_counter() - began) / max(len(d.tokens) for d in drawn)
            self._most_tokens = max(1, min(_MOST_TOKENS, int(_STEP_S / token_s)))

    def _hand_out(self, drawn: Sequence[Drawn]) -> None:
        rows: dict[int, list[tuple[Any, ...]]] = {}  # by HTTP process
        broken: set[_Request] = set()
        for sequence, tokens, logprobs, tops, finish in drawn:
            request, i = self._owners[sequence]
            if not all(map(math.isfinite, logprobs)):
                broken.add(request)
            rows.setdefault(request.origin.consumer, []).append((request.origin.uid, i, tokens, logprobs, tops, finish))
            if finish is not None:
                self._leave(request, [i])
        for request in broken:
            self._fail(request, *_why_nothing_is_left(request))
        for consumer, columns in rows.items():
            self._mailbox.tell(Origin(consumer, -1), Drew(self._version, list(zip(*columns, strict=True))))

    def _leave(self, request: _Request, indices: Iterable[int]) -> list[int]:
        """Forgets completions of a request; returns the sequences of those in the batch."""
        sequences = [request.running.pop(i) for i in indices if i in request.running]
        for sequence in sequences:
            del self._owners[sequence]
        if not request.running and not request.waiting:
            self._requests.pop(request.origin, None)
            self._line.pop(request.origin, None)
        return sequences

    def _cancel(self, origin: Origin, indices: frozenset[int] | None = None) -> None:
        """Ends all completions of a request (None), or some, wherever they are."""
        self._scoring = deque(each for each in self._scoring if each[0] != origin)
        if (request := self._requests.get(origin)) is None:
            return
        gone = {*request.waiting, *request.running} if indices is None else indices
        request.waiting = deque(i for i in request.waiting if i not in gone)
        if not request.waiting:
            self._line.pop(origin, None)
        self._batch.remove(self._leave(request, gone))

    def _fail(self, request: _Request, *error: Any) -> None:
        self._cancel(request.origin)
        self._mailbox.tell(request.origin, Failure(request.origin.uid, *error))

    def _score_one(self) -> None:
        """Scores one of the prompts whose log-probabilities were asked for."""
        if not self._scoring:
            return
        origin, job = self._scoring.popleft()
        try:
            scored = self._batch.prompt_logprobs(job.prompt_ids, top=job.top)
        except Exception:  # as in decoding: this request is lost, the server goes on
            log.exception("scoring a prompt failed; its request is answered with 500")
            told: Any = Failure(origin.uid, "scoring the prompt failed; the server's log has the details.")
        else:
            finite = all(math.isfinite(token.logprob) for token in scored if token.logprob is not None)
            told = Answer(origin.uid, scored) if finite else Failure(origin.uid, _DIVERGED)
        self._mailbox.tell(origin, told)


class _Compiled(NamedTuple):
    """Message of a thread that has compiled the grammar of a request, or the reason why it did not."""

    request: _Request
    told: CompiledGrammar | str


def _why_nothing_is_left(request: _Request) -> tuple[Any, ...]:
    """The error of a request whose log-probabilities are not finite."""
    job, grammar = request.job, request.grammar
    if grammar is not None and job.grammar is not None and grammar.error:
        message = f"{job.grammar.field}: the grammar is too complex to follow: {grammar.error.rstrip('.')}."
        return message, 400, job.grammar.field, "invalid_value"
    if grammar is not None or job.parts[0].options.logits is not None:
        message = "bad_words, min_tokens and the grammar exclude every token: nothing is left to draw."
        return message, 400, None, "invalid_value"
    return (_DIVERGED,)
