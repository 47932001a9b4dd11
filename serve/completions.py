"""``/v1/chat/completions`` and ``/v1/completions``, streaming and not."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from grpo_pl.rollout.continuous import SequenceOptions
from grpo_pl.rollout.engine import row_keys
from grpo_pl.rollout.texts import TextStream
from serve.answers import ChatShape, Choice, CompletionShape, Shape, Token, event, usage_of
from serve.connection import merged, while_connected
from serve.dispatch import Deadline, Generator
from serve.errors import ApiError, bad_request, json_response
from serve.generate_worker import Chunk
from serve.metrics import ServerMetrics
from serve.prompts import Prompts, sample_keys
from serve.schemas import ChatRequest, CompletionRequest, parse
from serve.settings import MAX_SAMPLES

log = logging.getLogger(__name__)

Growth = tuple[Choice, str, list[Token], int]
"""What is new in a choice: text, tokens, and where the text begins."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that has been checked: what to draw and how to write it."""

    request: ChatRequest | CompletionRequest
    prompts: Sequence[Sequence[int]]
    options: Sequence[SequenceOptions]  # per prompt
    shape: Shape
    prefill: str
    seed: int
    began: float

    def choices(self, prompts: Prompts) -> list[Choice]:
        """Empty ones, the samples of a prompt side by side."""
        tokenizer = prompts.model.tokenizer
        count = self.request.n * len(self.prompts)
        return [Choice(i, TextStream(tokenizer, self.request.stops, prefix=self.prefill)) for i in range(count)]


class CompletionRoutes:
    """Both routes; they differ in how a prompt is made and in the shape of the answer."""

    def __init__(self, *, generator: Generator, prompts: Prompts, metrics: ServerMetrics, deadline_s: float) -> None:
        self._generator, self._prompts, self._metrics, self._deadline_s = generator, prompts, metrics, deadline_s

    async def chat(self, request: Request) -> Response:
        began, body = time.monotonic(), parse(ChatRequest, await request.body())
        self._check_model(body.model)
        ids = await self._prompts.from_messages(body.messages)
        return await self._answer(request, body, [ids], began)

    async def completions(self, request: Request) -> Response:
        began, body = time.monotonic(), parse(CompletionRequest, await request.body())
        self._check_model(body.model)
        if not 1 <= len(body.prompts) * body.n <= 4 * MAX_SAMPLES:
            raise bad_request(f"prompt: give 1 to {4 * MAX_SAMPLES // body.n} prompts with n={body.n}.", param="prompt")
        prompts = [await self._prompts.from_raw(prompt) for prompt in body.prompts]
        return await self._answer(request, body, prompts, began)

    async def _answer(
        self, request: Request, body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], began: float
    ) -> Response:
        chat, alternatives = isinstance(body, ChatRequest), body.alternatives
        model = self._prompts.model
        job = Job(
            request=body,
            prompts=prompts,
            options=[
                self._prompts.options(ids, body, ignore_eos=body.ignore_eos, top=alternatives or 0) for ids in prompts
            ],
            shape=(ChatShape if chat else CompletionShape)(
                model.name, model.tokenizer, logprobs=alternatives is not None
            ),
            prefill=model.template.prefill if chat else "",
            seed=body.seed_or_random(),
            began=began,
        )
        if not body.stream:
            return await while_connected(request, self._whole(job))
        events = self._events(job)
        first = await while_connected(request, _first(events))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_resumed(first, events), media_type="text/event-stream", headers=headers)

    async def _whole(self, job: Job) -> Response:
        choices = job.choices(self._prompts)
        async with aclosing(self._grow(job, choices)) as steps:
            async for _ in steps:
                pass
        return json_response(job.shape.whole(choices, usage_of(job.prompts, choices)))

    async def _events(self, job: Job) -> AsyncGenerator[str, None]:
        """The events of a stream. A failure before the first is raised, a later one becomes the last event."""
        choices, started = job.choices(self._prompts), False
        try:
            async with aclosing(self._grow(job, choices)) as steps:
                async for choice, text, tokens, offset in steps:
                    if not started:
                        started = True
                        self._metrics.first_token(time.monotonic() - job.began)
                        for each in choices:
                            if (opening := job.shape.opening(each.index, job.prefill)) is not None:
                                yield opening
                    if text or tokens or choice.finish is not None:
                        yield job.shape.chunk(choice.index, text, tokens, choice.finish, offset=offset)
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
                error = ApiError(500, "internal error; the server's log has the details.", code="internal_error")
            yield event(error.body())  # without [DONE] after it: a client must not take this for a short answer
            return
        if job.request.include_usage:
            yield job.shape.usage_chunk(usage_of(job.prompts, choices))
        yield "data: [DONE]\n\n"

    async def _grow(self, job: Job, choices: list[Choice]) -> AsyncGenerator[Growth, None]:
        """Fills ``choices`` and yields what is new."""
        n = job.request.n
        stopped: list[set[int]] = [set() for _ in job.prompts]
        for ids in job.prompts:
            self._metrics.count_prompt(len(ids))
        streams = [self._one_prompt(job, p, stopped[p]) for p in range(len(job.prompts))]
        offsets = [0] * len(choices)  # where the next text begins, for those who asked for log-probabilities
        async with aclosing(merged(streams)) as parts:
            async for p, chunks in parts:
                for chunk in chunks:
                    choice = choices[p * n + chunk.index]
                    if choice.finish is not None:
                        continue  # drawn after a stop string, before the worker heard of it
                    text, tokens = choice.push(chunk)
                    self._metrics.count_tokens(len(tokens))
                    if choice.stream.stopped:
                        stopped[p].add(chunk.index)
                    yield choice, text, tokens, offsets[choice.index]
                    if job.request.alternatives is not None:
                        offsets[choice.index] += sum(len(job.shape.token_text(t.id)) for t in tokens)

    async def _one_prompt(self, job: Job, p: int, stopped: set[int]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
        ids = job.prompts[p]
        chunks = self._generator.generate(
            ids,
            row_keys([sample_keys(ids, seed=job.seed, n=job.request.n)]),
            job.options[p],
            live=job.request.stream or bool(job.request.stops),
            deadline=Deadline(self._deadline_s),
            bounded=p == 0,  # the first prompt of a request may be refused; the others then wait for their turn
            stopped=stopped,
        )
        async with aclosing(chunks):
            async for part in chunks:
                yield p, part

    def _check_model(self, name: str | None) -> None:
        mine = self._prompts.model.name
        if name is not None and name != mine:
            raise ApiError(
                404, f"there is no model {name!r} here, only {mine!r}.", code="model_not_found", param="model"
            )


async def _first(events: AsyncGenerator[str, None]) -> str:
    return await anext(events)


async def _resumed(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield first
        async for item in events:
            yield item
