"""``GenerateWorker``: holds the model and decodes all requests in one continuous batch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from grpo_pl.policy.trained import ServedModel
from grpo_pl.processes.variables import MODEL, clean_environment
from grpo_pl.rollout.native.continuous import Drawn, SequenceOptions
from grpo_pl.rollout.thinking import ThoughtMask
from serve.grammar_judge import Unusable
from serve.grammars import Compiled, Grammar, GrammarMask, Grammars
from serve.versions import DropWeights, LoadWeights, Versions
from serve.worker_channel import Answer, Cancel, Failure, FrontChannel, InvalidRequest, WorkerTask

log = logging.getLogger(__name__)

_STEP_S = 0.01
"""Seconds after which a step is to end: requests join and leave between two steps."""
_MOST_TOKENS = 16
"""Most tokens that a sequence gets in one step."""
_DIVERGED = "the policy's logits are not finite: its weights have diverged."


@dataclass(frozen=True)
class Generate:
    """Request to draw one completion per key. Completions may leave the batch and come back, so that there may be
    several messages of one request; each begins a stay of some of its completions."""

    prompt_ids: list[int]
    keys: list[int]
    options: SequenceOptions
    grammar: Grammar | None = None
    """Grammar that the completions must match; None for no grammar."""
    version: int = 0
    """Number of the version of the weights that draws them."""
    evaluation: bool = False
    """True for an evaluation: such prompts join the batch one per decoding step, because many at once
    would delay the next token of all running completions."""
    stay: int = 0
    """Number of the stay."""
    indices: tuple[int, ...] = ()
    """Indices of the completions that the keys belong to."""
    drawn: tuple[int, ...] = ()
    """Tokens that its one completion has drawn in earlier stays."""


class ScorePrompt(NamedTuple):
    """Request for the log-probabilities of a prompt's own tokens, and of the ``top`` likeliest at each position."""

    prompt_ids: list[int]
    top: int
    version: int = 0


class Started(NamedTuple):
    """Reply when completions of a request have joined the batch, with their sequence numbers there."""

    uid: int
    stay: int
    indices: tuple[int, ...]
    sequences: list[int]


class Step(NamedTuple):
    """The tokens drawn in one step, as columns of ``Drawn``; one message for the whole batch."""

    columns: list[tuple[Any, ...]]


class _Request(NamedTuple):
    """A prompt that waits, or whose completions are drawn."""

    uid: int
    job: Generate | ScorePrompt
    masks: Sequence[GrammarMask] = ()


class GenerateWorker(WorkerTask):
    """Takes :class:`Generate`, :class:`ScorePrompt`, ``LoadWeights``, ``DropWeights`` and ``Cancel``; answers with
    :class:`Started`, :class:`Step` …"""

    def __init__(self, model: ServedModel, *, device: str, max_batch_size: int) -> None:
        self._served, self._target, self._size = model, device, max_batch_size

    def environment(self) -> dict[str, str]:
        return clean_environment(MODEL)

    def prepare(self) -> None:
        import torch

        from grpo_pl.policy.loading import eos_ids

        if self._target == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # leaves one core to the front process
        self._versions = Versions(self._served, device=self._target, size=self._size)
        self._grammars = Grammars(self._served.tokenizer, eos_ids(self._versions[0].policy, self._served.tokenizer))

    def work(self, front: FrontChannel) -> None:
        self._front = front
        self._owners: dict[int, tuple[_Request, int]] = {}  # by sequence: whose, and the index of its completion
        self._deferred: deque[_Request] = deque()  # one is handled per decoding step
        self._compiling: list[tuple[int, Generate, Compiled | None]] = []  # None: there is no room for it yet
        self._most_tokens = 1  # in the next step
        while True:
            busy = self._versions.decoding or self._versions.is_loading or self._deferred or self._compiling
            for uid, payload in front.take(wait_for_one=not busy):
                self._receive(uid, payload)
            for answer in self._versions.answers():
                front.send(answer)
            self._start_compiled()
            self._do_one_deferred()
            for number in self._versions:
                self._decode(number)

    def _decode(self, number: int) -> None:
        """Draws the next tokens of every sequence of one version of the weights."""
        began = time.perf_counter()
        try:
            drawn = self._versions[number].batch.step(self._most_tokens)
        except Exception:  # the model's own code may fail: this batch is lost, the server goes on
            log.exception("decoding failed; its requests are answered with 500")
            lost = {s: request.uid for s, (request, _) in self._owners.items() if request.job.version == number}
            for uid in set(lost.values()):
                self._fail(uid, "decoding failed; the server's log has the details.")
            for sequence in lost:
                del self._owners[sequence]
            self._versions.empty(number)
        else:
            self._hand_out(drawn)
            token_s = (time.perf_counter() - began) / max(len(d.tokens) for d in drawn)
            self._most_tokens = max(1, min(_MOST_TOKENS, int(_STEP_S / token_s)))

    def _receive(self, uid: int, payload: Any) -> None:
        if isinstance(payload, Cancel):
            self._cancel(uid, payload.indices)
        elif isinstance(payload, LoadWeights):
            self._versions.load(uid, payload)
        elif isinstance(payload, DropWeights):
            self._versions.drop(payload.number)
        elif isinstance(payload, Generate) and payload.grammar is not None:
            self._compiling.append((uid, payload, self._grammars.compile(payload.grammar)))
        else:
            self._admit(_Request(uid, payload))

    def _admit(self, request: _Request) -> None:
        """Starts a prompt, unless it would delay running completions if many came at once."""
        if isinstance(request.job, ScorePrompt) or request.job.evaluation or request.job.drawn:
            self._deferred.append(request)
        else:
            self._start(request.uid, request.job, request.masks)

    def _start_compiled(self) -> None:
        """Starts the completions whose grammars have been compiled meanwhile, beside the decoding."""
        waiting, self._compiling = self._compiling, []
        for uid, job, compiled in waiting:
            grammar = job.grammar
            assert grammar is not None
            if not job.keys:  # its completions have been taken out of the batch, or stopped
                if compiled is not None:
                    self._grammars.give_up(grammar, compiled)
            elif compiled is None or not compiled.matcher.done():
                self._compiling.append((uid, job, compiled or self._grammars.compile(grammar)))
            else:
                try:
                    masks = self._grammars.masks(compiled, len(job.keys))
                except Unusable as error:
                    self._fail(uid, _refused(grammar, f"the grammar cannot be used: {error}"))
                except Exception:  # llguidance may raise anything on a client's text; the server goes on
                    log.exception("a grammar failed; its request is answered with 500")
                    self._fail(uid, "compiling the grammar failed; the server's log has the details.")
                else:
                    self._admit(_Request(uid, job, masks))

    def _do_one_deferred(self) -> None:
        """Handles one of the prompts that were put off; pauses shortly where there is nothing to do but wait for
        threads."""
        if self._deferred:
            uid, job, masks = self._deferred.popleft()
            if isinstance(job, ScorePrompt):
                self._score(uid, job)
            elif job.keys:
                self._start(uid, job, masks)
        elif (self._compiling or self._versions.is_loading) and not self._versions.decoding:
            time.sleep(0.001)

    def _score(self, uid: int, job: ScorePrompt) -> None:
        try:
            scored = self._versions[job.version].batch.prompt_logprobs(job.prompt_ids, top=job.top)
        except Exception:  # as in decoding: this request is lost, the server goes on
            log.exception("scoring a prompt failed; its request is answered with 500")
            self._fail(uid, "scoring the prompt failed; the server's log has the details.")
            return
        if all(math.isfinite(token.logprob) for token in scored if token.logprob is not None):
            self._front.send(Answer(uid, scored))
        else:
            self._fail(uid, _DIVERGED)

    def _start(self, uid: int, job: Generate, masks: Sequence[GrammarMask]) -> None:
        budget, thoughts = job.options.sampling.thinking_budget, list[ThoughtMask]()
        if isinstance(budget, int):
            end = self._served.template.thought_of(self._served.tokenizer)
            thoughts = [ThoughtMask(end, budget) for _ in job.keys]
        try:
            sequences = self._versions[job.version].batch.add(
                job.prompt_ids, job.keys, job.options, masks or thoughts or None, drawn=job.drawn
            )
        except ValueError as error:
            self._fail(uid, str(error))
            return
        except Exception:  # as in decoding: this request is lost, the server goes on
            log.exception("a prompt could not join the batch; its request is answered with 500")
            self._fail(uid, "the prompt could not be read; the server's log has the details.")
            return
        request = _Request(uid, job, masks)
        self._owners |= {sequence: (request, i) for sequence, i in zip(sequences, job.indices, strict=True)}
        self._front.send(Started(uid, job.stay, job.indices, sequences))

    def _cancel(self, uid: int, indices: frozenset[int] | None) -> None:
        """Ends all completions of a request (None), or some, wherever they are."""
        self._compiling = [
            (each, _without(job, indices) if each == uid else job, compiled) for each, job, compiled in self._compiling
        ]
        waiting, self._deferred = self._deferred, deque()
        for request in waiting:
            if request.uid != uid:
                self._deferred.append(request)
            elif indices is not None and isinstance(request.job, Generate):
                self._deferred.append(request._replace(job=_without(request.job, indices)))
        ended = [
            sequence
            for sequence, (request, i) in self._owners.items()
            if request.uid == uid and (indices is None or i in indices)
        ]
        if ended:  # all of one version, as the request
            self._versions[self._owners[ended[0]][0].job.version].batch.remove(ended)
        for sequence in ended:
            del self._owners[sequence]

    def _hand_out(self, drawn: list[Drawn]) -> None:
        broken = [self._owners[d.sequence][0] for d in drawn if not all(map(math.isfinite, d.logprobs))]
        for d in drawn:
            if d.finish is not None:
                del self._owners[d.sequence]
        for uid, request in {request.uid: request for request in broken}.items():
            self._cancel(uid, None)
            self._fail(uid, _why_nothing_is_left(request))
        self._front.send(Step(list(zip(*drawn, strict=True))))

    def _fail(self, uid: int, reason: str | InvalidRequest) -> None:
        self._front.send(Failure(uid, reason))


def _without(job: Generate, indices: frozenset[int] | None) -> Generate:
    """The job for its other completions, which may be none."""
    gone = frozenset(job.indices) if indices is None else indices
    kept = [(i, key) for i, key in zip(job.indices, job.keys, strict=True) if i not in gone]
    return replace(job, indices=tuple(i for i, _ in kept), keys=[key for _, key in kept])


def _refused(grammar: Grammar, why: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.field}: {why.rstrip('.')}.", grammar.field, "invalid_value")


def _why_nothing_is_left(request: _Request) -> str | InvalidRequest:
    """The reason for the failure of a request whose log-probabilities are not finite."""
    _, job, masks = request
    assert isinstance(job, Generate)
    error = next((mask.error for mask in masks if mask.error), "")
    if error and job.grammar is not None:
        return _refused(job.grammar, f"the grammar is too complex to follow: {error}")
    if masks or job.options.logits is not None:
        message = "bad_words, min_tokens and the grammar exclude every token: nothing is left to draw."
        return InvalidRequest(message, None, "invalid_value")
    return _DIVERGED
