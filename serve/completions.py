"""``PolicySpec``: ``/v1/chat/completions`` and ``/v1/completions``, streaming and not, and ``/tokenize``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve import grammars
from serve.answers import ChatFormat, Choice, ChoicesFormat, Chunk, CompletionFormat, TokenTexts
from serve.bodies import in_thread, large_json_response
from serve.calls import Call, Deadline, QueueFull, WorkerSpec
from serve.errors import ApiError, bad_request, check_model, json_response
from serve.follow import Followed, version_id
from serve.grammars import Grammar
from serve.messages import Draw, Drew, Joined, Part, ScorePrompt
from serve.metrics import ServerMetrics
from serve.prompts import Prompts
from serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.settings import MAX_SAMPLES
from serve.streaming import EventStream, while_connected
from serve.worker import Cancel

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_MOST_LOGPROBS = 1 << 20  # in one answer: each takes some hundred bytes
_GAP_S = 0.001
"""Least seconds between two events of a stream, times the number of open streams: the cost of events per second then
does not grow with the number of streams."""
Growth = tuple[Choice, str, list[ScoredToken]]
"""A choice with its new text and new tokens."""


class DrawCall(Call):
    """The completions of one request; iterating waits for new tokens.

    Args:
        live: tokens are read as they arrive, not only at the end.
    """

    def __init__(self, uid: int, job: Draw, *, live: bool) -> None:
        super().__init__(uid)
        self.live, self.evaluation = live, job.evaluation
        self.left = set(range(len(job.parts) * len(job.parts[0].keys)))
        """Indices of the completions that are not finished."""
        self.joined = 0
        """Number of completions that have got a slot."""
        self.running = 0
        """Number of those that have one."""
        self.heard = False
        """True once the reader has been woken for the first tokens."""
        self._chunks: dict[int, Chunk] = {}  # that are not read yet, by index

    def __aiter__(self) -> DrawCall:
        return self

    async def __anext__(self) -> list[Chunk]:
        while True:
            if self._chunks and (self._ended or self._news.is_set()):
                self._news.clear()
                chunks, self._chunks = list(self._chunks.values()), {}
                return chunks
            if self._ended:
                raise self._failure or StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Lets the reader take the tokens that have arrived."""
        self.heard = True
        self._news.set()

    def add(self, index: int, *drawn: Any) -> None:
        """Adds what one step drew of a completion."""
        if index not in self._chunks:
            self._chunks[index] = Chunk(index)
        self._chunks[index].add(*drawn)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request: what to draw, and the format of the answer."""

    request: ChatRequest | CompletionRequest
    draw: Draw
    choices: Sequence[Choice]
    """Without tokens at first; the n choices of a prompt are neighbours."""
    answer_format: ChoicesFormat
    deadline: Deadline


class PolicySpec(WorkerSpec):
    """The routes that draw completions.

    Args:
        size: completions decoded at once.
    """

    def __init__(self, model: ServedModel, *, size: int, deadline: float, max_queue: int) -> None:
        super().__init__(CHAT, deadline=deadline, max_queue=max_queue)
        self.model, self.size, self.metrics = model, size, ServerMetrics()
        self.prompts, self.version, self.not_followed = Prompts(model), version_id(model), ""
        self._texts = TokenTexts(model.tokenizer)
        self._streams = 0
        self._unread: set[DrawCall] = set()  # streams with tokens for which their reader has not been woken
        self._woken_at = 0.0
        self._wake_timer: asyncio.TimerHandle | None = None
        self.add_route(CHAT, ChatRequest, self.chat)
        self.add_route("/v1/completions", CompletionRequest, self.completions)
        self.add_route("/tokenize", TokenizeRequest, self.tokenize)
        self.add_route("/detokenize", DetokenizeRequest, self.detokenize)

    # --- routes -----------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """OpenAI chat. With a grammar the template's prefill is left out, because it may not match."""
        check_model(body.model, self.model.name)
        free = body.grammar is None and not body.must_call
        ids = await self.prompts.from_messages(body.messages, body.offered, prefill=free)
        prefill = self.model.template.prefill if free else ""
        return await self._answer(request, body, [ids], [prefill], ChatFormat(self.model.name, body, self._texts))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """The same for plain prompts."""
        check_model(body.model, self.model.name)
        if not 1 <= len(body.prompts) * body.n <= 4 * MAX_SAMPLES:
            raise bad_request("prompt", f"give 1 to {4 * MAX_SAMPLES // body.n} prompts with n={body.n}.")
        prompts = [await self.prompts.from_raw(prompt) for prompt in body.prompts]
        echoed = [
            prompt if isinstance(prompt, str) else str(self.model.tokenizer.decode(prompt, skip_special_tokens=False))
            for prompt in body.prompts
            if body.echo
        ]
        told = CompletionFormat(self.model.name, body, self._texts)
        return await self._answer(request, body, prompts, echoed or [""] * len(prompts), told)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Text or messages to token ids, in vLLM's format."""
        check_model(body.model, self.model.name)
        if body.messages is not None:
            ids = await self.prompts.from_messages(body.messages, body.tools)
        else:
            ids = await in_thread(self.prompts.of_text, str(body.prompt), body.add_special_tokens)

        def answer() -> Response:
            names = self.model.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            told = {"count": len(ids), "max_model_len": self.model.context, "tokens": ids, "token_strs": names}
            return json_response(told)

        return await in_thread(answer)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """Token ids to text."""
        check_model(body.model, self.model.name)
        self.prompts.check_ids(body.tokens, "tokens")
        text = await in_thread(lambda: self.model.tokenizer.decode(body.tokens, skip_special_tokens=False))
        return json_response({"prompt": str(text)})

    # --- a request --------------------------------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        prefixes: Sequence[str],
        answer_format: ChoicesFormat,
    ) -> Response:
        """The answer as a stream, or whole; the work ends if the client hangs up."""
        job = self._job(body, prompts, prefixes, answer_format)
        if body.stream:
            return EventStream(request, self._events(job))
        return await while_connected(request, self._whole(job))

    def _job(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        prefixes: Sequence[str],
        answer_format: ChoicesFormat,
    ) -> Job:
        """Checks the fields that need the model."""
        grammar = self._grammar(body)
        if grammar is not None and body.max_thinking_tokens is not None:
            raise bad_request("max_thinking_tokens", "an answer that follows a grammar has no thought.")
        templated = isinstance(body, ChatRequest) and grammar is None
        logits, seed = self.prompts.logits(body), body.seed_or_random()
        self.prompts.check_ids(body.stop_token_ids, "stop_token_ids")
        parts: list[Part] = []
        choices: list[Choice] = []
        for ids, prefix in zip(prompts, prefixes, strict=True):
            part = self.prompts.part(ids, body, logits, seed=seed, templated=templated)
            options = replace(
                part.options,
                ignore_eos=body.ignore_eos,
                top_logprobs=body.alternatives or 0,
                stop_token_ids=tuple(body.stop_token_ids),
            )
            parts.append(part._replace(options=options))
            for _ in range(body.n):
                stream = TextStream(self.model.tokenizer, body.stop, prefix=prefix, min_tokens=body.min_tokens)
                reader = None
                if isinstance(body, ChatRequest) and body.offered:
                    reader = self.prompts.reader(body.offered, several=body.parallel_tool_calls)
                choices.append(
                    Choice(len(choices), stream, ids, body.stop_token_ids, reader=reader, streams=body.stream)
                )
        if body.alternatives is not None:
            drawn = body.n * sum(part.options.sampling.max_completion_length for part in parts)
            echoed = body.n * sum(map(len, prompts)) if isinstance(body, CompletionRequest) and body.echo else 0
            if (drawn + echoed) * (1 + body.alternatives) > _MOST_LOGPROBS:
                asked = f"{drawn + echoed} tokens with {body.alternatives} likely ones each"
                message = f"{asked} are more than {_MOST_LOGPROBS:,} log-probabilities: ask for less at once."
                raise bad_request("logprobs", message)
        draw, deadline = Draw(parts, grammar), Deadline(self.deadline)
        return Job(request=body, draw=draw, choices=choices, answer_format=answer_format, deadline=deadline)

    def _grammar(self, body: ChatRequest | CompletionRequest) -> Grammar | None:
        """The grammar that completions must match; None if they may be any text.

        Raises:
            ApiError: there is one, and llguidance is not installed (400).
        """
        grammar, tools = body.grammar, body.must_call if isinstance(body, ChatRequest) else []
        if grammar is None and not tools:
            return None
        if not grammars.is_available():
            field = "tool_choice" if grammar is None else grammar.field
            message = "structured outputs need llguidance on the server: pip install 'grpo_pl[structured]'."
            raise bad_request(field, message, code="unsupported_parameter")
        if isinstance(body, ChatRequest) and tools:
            return self.prompts.call_grammar(tools, several=body.parallel_tool_calls)
        return grammar

    async def _whole(self, job: Job) -> Response:
        async with aclosing(self._growth(job)) as steps:
            async for _ in steps:
                pass
        return await large_json_response(lambda: job.answer_format.whole(job.choices))

    async def _events(self, job: Job) -> AsyncGenerator[str, None]:
        """The events of a stream. A failure before the first event is raised, a later one becomes the last event."""
        answer_format, choices, started = job.answer_format, job.choices, False
        try:
            async with aclosing(self._growth(job)) as steps:
                async for grown in steps:
                    events: list[str] = []
                    if not started:
                        started = True
                        self.metrics.first_token.observe(job.deadline.spent())
                        events += map(answer_format.opening, choices)
                    events += [answer_format.chunk(*growth, choices) for growth in grown]
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

    async def _growth(self, job: Job) -> AsyncGenerator[list[Growth], None]:
        """Draws a job's completions and adds their tokens to the choices; yields lists of what arrived together."""
        body, choices = job.request, job.choices
        self.metrics.prompt_tokens.inc(sum(len(part.prompt_ids) for part in job.draw.parts))
        if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
            for p, part in enumerate(job.draw.parts):
                question = ScorePrompt(part.prompt_ids, part.options.top_logprobs)
                scored = await self.ask(question, deadline=job.deadline)
                for choice in choices[p * body.n : (p + 1) * body.n]:
                    choice.echoed = scored
        job.answer_format.system_fingerprint = self.version
        if body.length == 0:
            for choice in choices:
                choice.finish = "length"
            yield [(choice, "", []) for choice in choices]
            return
        live = body.stream or bool(body.stop) or any(choice.ends_early for choice in choices)
        with self.draw(job.draw, deadline=job.deadline, live=live) as call:
            async for chunks in call:
                job.answer_format.system_fingerprint = self.version
                # what was drawn after a stop string, before the worker was told to stop, is left out
                going = [chunk for chunk in chunks if choices[chunk.index].finish is None]
                grown = [(choices[chunk.index], *choices[chunk.index].push(chunk)) for chunk in going]
                self.metrics.count_tokens(sum(len(tokens) for _, _, tokens in grown))
                if stopped := {choice.index for choice, _, _ in grown if choice.stream.stopped} & call.left:
                    self._stop(call, stopped)
                if grown:
                    yield grown
                await asyncio.sleep(0)

    # --- the worker's answers ---------------------------------------------------------------------------------------

    @contextmanager
    def draw(self, job: Draw, *, deadline: Deadline, live: bool, bounded: bool = True) -> Iterator[DrawCall]:
        """Context manager: the completions of a job join the batch as they get slots; leaving it early cancels them.

        Raises:
            QueueFull: ``bounded``, and too many requests wait.
            ApiError: see `ask`; also while reading.
        """
        if bounded:
            waiting, free = self.waiting(evaluation=job.evaluation), self.size - self.running
            if waiting >= self.max_queue + max(0, free):
                raise QueueFull(waiting)
        call = DrawCall(next(self._uids), job, live=live)
        with self.registered(call, deadline):
            self._streams += live
            try:
                self.send(call.uid, job)
                yield call
            finally:
                self._streams -= live

    @property
    def running(self) -> int:
        """Number of completions that have a slot of the batch."""
        return sum(call.running for call in self.calls.values() if isinstance(call, DrawCall))

    def waiting(self, *, evaluation: bool) -> int:
        """Number of requests that have had no slot yet."""
        calls = [call for call in self.calls.values() if isinstance(call, DrawCall)]
        return sum(not call.joined for call in calls if call.evaluation == evaluation)

    def handle(self, message: Any) -> None:
        if isinstance(message, Drew):
            self._hand_out(message.columns)
        elif isinstance(message, Followed):
            self.version, self.not_followed = message.version or self.version, message.error
        elif isinstance(message, Joined):
            if isinstance(call := self.calls.get(message.uid), DrawCall):
                call.joined, call.running = call.joined + message.slots, call.running + message.slots
                self.version = message.version
        else:
            super().handle(message)

    def forget(self, call: Call) -> None:
        super().forget(call)
        if isinstance(call, DrawCall):
            self._unread.discard(call)

    def _stop(self, call: DrawCall, indices: set[int]) -> None:
        """Stops the drawing of the completions with these indices."""
        if call.uid in self.calls:
            self.send(call.uid, Cancel(frozenset(indices)))
            self._finish(call, indices)

    def _finish(self, call: DrawCall, indices: set[int]) -> None:
        call.left -= indices
        call.running = max(0, call.running - len(indices))
        if not call.left:
            self.forget(call)
            call.end()

    def _hand_out(self, columns: Sequence[tuple[Any, ...]]) -> None:
        """Gives the tokens of one step to their calls."""
        for uid, i, *drawn, finish in zip(*columns, strict=True):
            call = self.calls.get(uid)
            if not isinstance(call, DrawCall) or i not in call.left:
                continue  # cancelled meanwhile
            call.add(i, *drawn, finish)
            if call.live and call.heard:
                self._unread.add(call)
            elif call.live:
                call.wake()
            if finish is not None:
                self._finish(call, {i})
        if self._unread and self._wake_timer is None:
            loop = asyncio.get_running_loop()
            self._wake_timer = loop.call_at(self._woken_at + _GAP_S * self._streams, self._wake_readers)

    def _wake_readers(self) -> None:
        self._wake_timer, self._woken_at = None, asyncio.get_running_loop().time()
        for call in self._unread:
            call.wake()
        self._unread.clear()
