"""``/v1/chat/completions`` and ``/v1/completions``, streaming and not."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import Request, Response

from grpo_pl.rollout.engine import row_keys
from grpo_pl.rollout.native.continuous import SequenceOptions
from grpo_pl.rollout.texts import TextStream
from serve import grammars
from serve.answers import ChatShape, Choice, CompletionShape, Shape, Token, event, usage_of
from serve.connection import EventStream, merged, while_connected
from serve.dispatch import Chunk, Deadline, Generator
from serve.errors import ApiError, bad_request, json_response
from serve.grammars import Grammar
from serve.metrics import ServerMetrics
from serve.prompts import Prompts, sample_keys
from serve.schemas import ChatRequest, CompletionRequest
from serve.settings import MAX_SAMPLES

log = logging.getLogger(__name__)


class Growth(NamedTuple):
    """What is new in a choice."""

    choice: Choice
    text: str
    tokens: list[Token]
    offset: int
    """Where the text begins, for those who asked for log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that has been checked: what to draw and how to write it."""

    request: ChatRequest | CompletionRequest
    prompts: Sequence[Sequence[int]]
    options: Sequence[SequenceOptions]  # per prompt
    prefixes: Sequence[str]  # per prompt: text before what is drawn
    shape: Shape
    seed: int
    began: float
    deadline: Deadline
    grammar: Grammar | None

    @property
    def echoes(self) -> bool:
        """Whether the prompts' own log-probabilities are to be told."""
        return isinstance(self.request, CompletionRequest) and self.request.echo and self.request.logprobs is not None

    def choices(self, prompts: Prompts) -> list[Choice]:
        """Empty ones, the samples of a prompt side by side."""
        request, tokenizer = self.request, prompts.model.tokenizer
        choices = []
        for i in range(request.n * len(self.prompts)):
            prefix = self.prefixes[i // request.n]
            stream = TextStream(tokenizer, request.stop, prefix=prefix, min_tokens=request.min_tokens)
            choices.append(Choice(i, stream, self.prompts[i // request.n], request.stop_token_ids))
        return choices


class CompletionRoutes:
    """Both routes; they differ in how a prompt is made and in the shape of the answer."""

    def __init__(self, *, generator: Generator, prompts: Prompts, metrics: ServerMetrics, deadline_s: float) -> None:
        self._generator, self._prompts, self._metrics, self._deadline_s = generator, prompts, metrics, deadline_s

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        began = time.monotonic()
        self._prompts.check_model(body.model)
        job = await self.chat_job(body, began)
        return await self._answer(request, job)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        began = time.monotonic()
        self._prompts.check_model(body.model)
        if not 1 <= len(body.prompts) * body.n <= 4 * MAX_SAMPLES:
            raise bad_request(f"prompt: give 1 to {4 * MAX_SAMPLES // body.n} prompts with n={body.n}.", param="prompt")
        prompts = [await self._prompts.from_raw(prompt) for prompt in body.prompts]
        tokenizer = self._prompts.model.tokenizer
        echoed = [
            prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt, skip_special_tokens=False))
            for prompt in body.prompts
            if body.echo
        ]
        shape = self._shape(CompletionShape, body)
        return await self._answer(request, self._job(body, prompts, echoed or [""] * len(prompts), shape, began))

    async def chat_job(self, body: ChatRequest, began: float, shape: Shape | None = None) -> Job:
        """What to draw for a conversation. Completions that follow a grammar begin with it, not with a prefill."""
        plain = body.grammar is None
        ids = await self._prompts.from_messages(body.messages, prefill=plain)
        prefix = self._prompts.model.template.prefill if plain else ""
        return self._job(body, [ids], [prefix], shape or self._shape(ChatShape, body), began)

    def _shape(self, kind: type[Shape], body: ChatRequest | CompletionRequest) -> Shape:
        model, logprobs = self._prompts.model, body.alternatives is not None
        return kind(model.name, model.tokenizer, logprobs=logprobs, token_ids=body.return_token_ids)

    def _job(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[str],
        shape: Shape,
        began: float,
    ) -> Job:
        grammar = body.grammar
        if grammar is not None and not grammars.is_available():
            field = "response_format" if body.structured_outputs is None else "structured_outputs"
            raise bad_request(
                f"{field}: structured outputs need llguidance on the server: pip install 'grpo_pl[structured]'.",
                param=field,
                code="unsupported_parameter",
            )
        logits = self._prompts.logits(body)
        self._prompts.check_ids(body.stop_token_ids, "stop_token_ids")
        options = [
            self._prompts.options(
                ids,
                body,
                logits=logits,
                stop_token_ids=body.stop_token_ids,
                ignore_eos=body.ignore_eos,
                top=body.alternatives or 0,
            )
            for ids in prompts
        ]
        if body.alternatives is not None:
            drawn = body.n * sum(o.sampling.max_completion_length for o in options)
            echoed = body.n * sum(map(len, prompts)) if isinstance(body, CompletionRequest) and body.echo else 0
            self._prompts.check_logprobs(drawn + echoed, body.alternatives)
        return Job(
            request=body,
            prompts=prompts,
            options=options,
            prefixes=prefixes,
            shape=shape,
            seed=body.seed_or_random(),
            began=began,
            deadline=Deadline(self._deadline_s),
            grammar=grammar,
        )

    async def _answer(self, request: Request, job: Job) -> Response:
        if job.request.stream:
            return EventStream(request, self._events(job))
        return await while_connected(request, self._whole(job))

    async def _whole(self, job: Job) -> Response:
        choices = await self.finish(job)
        return json_response(job.shape.whole(choices, usage_of(job.prompts, choices)))

    async def finish(self, job: Job) -> list[Choice]:
        """All completions of a job."""
        choices = job.choices(self._prompts)
        async with aclosing(self.grow(job, choices)) as steps:
            async for _ in steps:
                pass
        return choices

    async def _events(self, job: Job) -> AsyncGenerator[str, None]:
        """The events of a stream. A failure before the first is raised, a later one becomes the last event."""
        choices, started = job.choices(self._prompts), False
        continuous = job.request.stream_options.continuous_usage_stats
        try:
            async with aclosing(self.grow(job, choices)) as steps:
                async for grown in steps:
                    events: list[str] = []
                    if not started:
                        started = True
                        self._metrics.first_token(time.monotonic() - job.began)
                        events += filter(None, map(job.shape.opening, choices))
                    for choice, text, tokens, offset in grown:
                        if text or tokens or choice.finish is not None:
                            usage = usage_of(job.prompts, choices) if continuous else None
                            events.append(
                                job.shape.chunk(choice, text, tokens, choice.finish, offset=offset, usage=usage)
                            )
                    if all(choice.finish is not None for choice in choices):
                        if job.request.stream_options.include_usage:
                            events.append(job.shape.usage_chunk(usage_of(job.prompts, choices)))
                        events.append("data: [DONE]\n\n")
                    if events:
                        yield "".join(events)
        except Exception as error:
            if not started:
                raise
            yield event(failure(error).body())  # no [DONE] after it: a client must not take this for a short answer
            return
        if job.request.stream_options.include_usage:
            yield job.shape.usage_chunk(usage_of(job.prompts, choices))
        yield "data: [DONE]\n\n"

    async def grow(self, job: Job, choices: list[Choice]) -> AsyncGenerator[list[Growth], None]:
        """Fills ``choices`` and yields what is new, together what came together."""
        n = job.request.n
        for ids in job.prompts:
            self._metrics.count_prompt(len(ids))
        if job.echoes:
            await self._echo(job, choices)
        if job.request.length == 0:
            for choice in choices:
                choice.finish = "length"
            yield [Growth(choice, "", [], 0) for choice in choices]
            return
        stopped: list[set[int]] = [set() for _ in job.prompts]
        offsets = [sum(len(job.shape.token_text(t.id)) for t in choice.echoed) for choice in choices]
        streams = [self._one_prompt(job, p, stopped[p]) for p in range(len(job.prompts))]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as parts:
            async for p, chunks in parts:
                grown = []
                for chunk in chunks:
                    choice = choices[p * n + chunk.index]
                    if choice.finish is not None:
                        continue  # drawn after a stop string, before the worker heard of it
                    text, tokens = choice.push(chunk)
                    grown.append(Growth(choice, text, tokens, offsets[choice.index]))
                    if choice.stream.stopped:
                        stopped[p].add(chunk.index)
                    if job.request.alternatives is not None:
                        offsets[choice.index] += sum(len(job.shape.token_text(t.id)) for t in tokens)
                self._metrics.count_tokens(sum(len(growth.tokens) for growth in grown))
                if grown:
                    yield grown

    async def _echo(self, job: Job, choices: Sequence[Choice]) -> None:
        """Puts the prompts' own tokens and log-probabilities into the choices."""
        n = job.request.n
        for p, ids in enumerate(job.prompts):
            top = job.request.alternatives or 0
            scored = await self._generator.score_prompt(ids, top=top, deadline=job.deadline, bounded=p == 0)
            for choice in choices[p * n : (p + 1) * n]:
                choice.echoed = [Token(*token) for token in scored]

    async def _one_prompt(self, job: Job, p: int, stopped: set[int]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
        ids = job.prompts[p]
        chunks = self._generator.generate(
            ids,
            row_keys([sample_keys(ids, seed=job.seed, n=job.request.n)]),
            job.options[p],
            live=job.request.stream or bool(job.request.stop),
            deadline=job.deadline,
            grammar=job.grammar,
            bounded=p == 0,  # the first prompt of a request may be refused; the others then wait for their turn
            stopped=stopped,
        )
        async with aclosing(chunks):
            async for part in chunks:
                yield p, part


def failure(error: Exception) -> ApiError:
    """What a client hears of a failure in the middle of a stream."""
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details.", code="internal_error")
