"""``/v1/chat/completions`` and ``/v1/completions``, streaming and not, over HTTP or in a ``PolicyAPI``."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request, Response

from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve import grammars
from serve.answers import AnswerFormat, ChatFormat, Choice, CompletionFormat, TokenTexts
from serve.errors import ApiError, bad_request, check_model
from serve.generate_worker import Generate, ScorePrompt
from serve.generator import Chunk, Generator
from serve.grammars import Grammar, GrammarChecker
from serve.large_json import large_json_response
from serve.metrics import ServerMetrics
from serve.prompts import Prompts
from serve.schemas import ChatRequest, CompletionRequest
from serve.settings import MAX_SAMPLES
from serve.streaming import EventStream, TimeSlices, merged, while_connected
from serve.weights import Weights
from serve.worker_client import Deadline

log = logging.getLogger(__name__)

_MOST_LOGPROBS = 1 << 20  # in one answer: each takes some hundred bytes
Growth = tuple[Choice, str, list[ScoredToken]]
"""A choice with its new text and new tokens."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request: what to draw, and the format of the answer."""

    request: ChatRequest | CompletionRequest
    draws: Sequence[Generate]
    """One per prompt."""
    choices: Sequence[Choice]
    """Without tokens at first; the n choices of a prompt are neighbours."""
    answer_format: AnswerFormat
    deadline: Deadline


@dataclass(kw_only=True)
class CompletionRoutes:
    """Both routes; they differ in how prompts are encoded and in the format of the answer."""

    generator: Generator
    grammars: GrammarChecker | None
    """None refuses requests with a grammar."""
    weights: Weights
    prompts: Prompts
    metrics: ServerMetrics
    deadline_s: float

    def __post_init__(self) -> None:
        self._slices, self._texts = TimeSlices(), TokenTexts(self.prompts.model.tokenizer)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self.answer(request, await self.chat_job(body))

    async def chat_job(self, body: ChatRequest, answer_format: AnswerFormat | None = None) -> Job:
        """The job that completes a conversation. With a grammar the template's prefill is left out, because it may not
        match.

        Args:
            answer_format: by default that of ``/v1/chat/completions``.
        """
        answer_format = answer_format or ChatFormat(self.prompts.model.name, body, self._texts)
        deadline, model = Deadline(self.deadline_s), self.prompts.model
        check_model(body.model, model.name)
        free = body.grammar is None and not body.must_call
        ids = await self.prompts.from_messages(body.messages, body.offered, prefill=free)
        prefill = model.template.prefill if free else ""
        (job,) = await self._slices.map(lambda ids: self._job(body, [ids], [prefill], answer_format, deadline), [ids])
        return job

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        deadline, model = Deadline(self.deadline_s), self.prompts.model
        check_model(body.model, model.name)
        if not 1 <= len(body.prompts) * body.n <= 4 * MAX_SAMPLES:
            raise bad_request("prompt", f"give 1 to {4 * MAX_SAMPLES // body.n} prompts with n={body.n}.")
        prompts = [await self.prompts.from_raw(prompt) for prompt in body.prompts]
        echoed = [
            prompt if isinstance(prompt, str) else str(model.tokenizer.decode(prompt, skip_special_tokens=False))
            for prompt in body.prompts
            if body.echo
        ]
        job = self._job(
            body, prompts, echoed or [""] * len(prompts), CompletionFormat(model.name, body, self._texts), deadline
        )
        return await self.answer(request, job)

    def _job(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        prefixes: Sequence[str],
        answer_format: AnswerFormat,
        deadline: Deadline,
    ) -> Job:
        grammar = self._grammar(body)
        if grammar is not None and body.max_thinking_tokens is not None:
            raise bad_request("max_thinking_tokens", "an answer that follows a grammar has no thought.")
        templated = isinstance(body, ChatRequest) and grammar is None
        logits, seed = self.prompts.logits(body), body.seed_or_random()
        self.prompts.check_ids(body.stop_token_ids, "stop_token_ids")
        draws: list[Generate] = []
        choices: list[Choice] = []
        for ids, prefix in zip(prompts, prefixes, strict=True):
            draw = self.prompts.job(ids, body, logits, seed=seed, templated=templated)
            options = replace(
                draw.options,
                ignore_eos=body.ignore_eos,
                top_logprobs=body.alternatives or 0,
                stop_token_ids=tuple(body.stop_token_ids),
            )
            draws.append(replace(draw, options=options, grammar=grammar))
            for _ in range(body.n):
                stream = TextStream(self.prompts.model.tokenizer, body.stop, prefix=prefix, min_tokens=body.min_tokens)
                reader = None
                if isinstance(body, ChatRequest) and body.offered:
                    reader = self.prompts.reader(body.offered, several=body.parallel_tool_calls)
                choices.append(
                    Choice(len(choices), stream, ids, body.stop_token_ids, reader=reader, streams=body.stream)
                )
        if body.alternatives is not None:
            drawn = body.n * sum(draw.options.sampling.max_completion_length for draw in draws)
            echoed = body.n * sum(map(len, prompts)) if isinstance(body, CompletionRequest) and body.echo else 0
            if (drawn + echoed) * (1 + body.alternatives) > _MOST_LOGPROBS:
                asked = f"{drawn + echoed} tokens with {body.alternatives} likely ones each"
                message = f"{asked} are more than {_MOST_LOGPROBS:,} log-probabilities: ask for less at once."
                raise bad_request("logprobs", message)
        return Job(request=body, draws=draws, choices=choices, answer_format=answer_format, deadline=deadline)

    def _grammar(self, body: ChatRequest | CompletionRequest) -> Grammar | None:
        """The grammar that completions must match; None if they may be any text.

        Raises:
            ApiError: there is one, and llguidance is not installed (400).
        """
        grammar, tools = body.grammar, body.must_call if isinstance(body, ChatRequest) else []
        if grammar is None and not tools:
            return None
        if self.grammars is None:
            raise ApiError(400, "structured outputs need the whole server, grpo-pl serve.", code="invalid_value")
        if not grammars.is_available():
            field = "tool_choice" if grammar is None else grammar.field
            message = "structured outputs need llguidance on the server: pip install 'grpo_pl[structured]'."
            raise bad_request(field, message, code="unsupported_parameter")
        if isinstance(body, ChatRequest) and tools:
            return self.prompts.call_grammar(tools, several=body.parallel_tool_calls)
        return grammar

    async def answer(self, request: Request, job: Job) -> Response:
        """The answer as a stream, or whole; the work ends if the client hangs up."""
        if job.request.stream:
            return EventStream(request, self.events(job))
        return await while_connected(request, self.whole(job))

    async def whole(self, job: Job) -> Response:
        async with aclosing(self.growth(job)) as steps:
            async for _ in steps:
                pass
        return await large_json_response(lambda: job.answer_format.whole(job.choices))

    async def growth(self, job: Job) -> AsyncGenerator[list[Growth], None]:
        """Draws a job's completions, with the version of the weights that is current now for all their tokens; yields
        lists of what has arrived together.

        Raises:
            ApiError: see ``GrammarChecker.check`` and ``Generator.generate``.
        """
        grammar = job.draws[0].grammar
        if grammar is not None and self.grammars is not None:
            async with job.deadline.limit():
                grammar = await self.grammars.check(grammar)
        with self.weights.lease() as version:
            job.answer_format.system_fingerprint = version.id
            draws = [replace(draw, grammar=grammar, version=version.number) for draw in job.draws]
            async with aclosing(self._grow(replace(job, draws=draws))) as steps:
                async for grown in steps:
                    yield grown

    async def events(self, job: Job) -> AsyncGenerator[str, None]:
        """The events of a stream. A failure before the first event is raised, a later one becomes the last event."""
        answer_format, choices, started = job.answer_format, job.choices, False
        try:
            async with aclosing(self.growth(job)) as steps:
                async for grown in steps:
                    events: list[str] = []
                    if not started:
                        started = True
                        self.metrics.first_token.observe(job.deadline.spent())
                        events += await self._slices.map(answer_format.opening, choices)
                    events += await self._slices.map(lambda growth: answer_format.chunk(*growth, choices), grown)
                    finished = all(choice.finish is not None for choice in choices)
                    if finished:
                        events.append(answer_format.closing(choices))
                    if any(events):
                        yield "".join(events)
                    if finished:
                        return
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, ApiError):
                log.error("a stream failed", exc_info=error)
                error = ApiError(500, "internal error; the server's log has the details.", code="internal_error")
            yield answer_format.failure(error)

    async def _grow(self, job: Job) -> AsyncGenerator[list[Growth], None]:
        """Adds tokens to the choices as they arrive; yields lists of what arrived together."""
        body, choices = job.request, job.choices
        self.metrics.prompt_tokens.inc(sum(len(draw.prompt_ids) for draw in job.draws))
        if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
            for p, draw in enumerate(job.draws):
                ask = ScorePrompt(draw.prompt_ids, draw.options.top_logprobs, draw.version)
                scored = await self.generator.score_prompt(ask, deadline=job.deadline, bounded=p == 0)
                for choice in choices[p * body.n : (p + 1) * body.n]:
                    choice.echoed = scored
        if body.length == 0:
            for choice in choices:
                choice.finish = "length"
            yield [(choice, "", []) for choice in choices]
            return
        stopped: list[set[int]] = [set() for _ in job.draws]
        streams = [self._one_prompt(job, p, stopped[p]) for p in range(len(job.draws))]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as parts:
            # choices grow here alone, and not in a prompt's stream, which `merged` lets run ahead of its reader
            async for p, chunks in parts:
                # what was drawn after a stop string, before the worker was told to stop, is left out
                going = [chunk for chunk in chunks if choices[p * body.n + chunk.index].finish is None]
                grown = await self._slices.map(partial(self._push, choices[p * body.n :]), going)
                stopped[p].update(choice.index - p * body.n for choice, _, _ in grown if choice.stream.stopped)
                self.metrics.count_tokens(sum(len(tokens) for _, _, tokens in grown))
                if grown:
                    yield grown

    def _push(self, choices: Sequence[Choice], chunk: Chunk) -> Growth:
        choice = choices[chunk.index]
        return choice, *choice.push(chunk)

    async def _one_prompt(self, job: Job, p: int, stopped: Set[int]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
        chunks = self.generator.generate(
            job.draws[p],
            live=job.request.stream or bool(job.request.stop) or any(choice.ends_early for choice in job.choices),
            deadline=job.deadline,
            bounded=p == 0,  # only the first prompt of a request may be refused; the others wait for their turn
            stopped=stopped,
        )
        async with aclosing(chunks):
            async for part in chunks:
                yield p, part
