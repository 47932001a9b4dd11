"""``PolicySpec``: ``/v1/chat/completions`` and ``/v1/completions``, streaming and not, and ``/tokenize``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response

from grpo_pl.extras.agents.call_reader import CallReader
from grpo_pl.policy.inputs import EncodedPrompt
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout import grammars
from grpo_pl.rollout.grammars import Grammar
from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve.answers import ChatFormat, Choice, ChoicesFormat, Chunk, CompletionFormat, TokenTexts, event
from serve.bodies import in_thread, large_json_response
from serve.calls import Call, Deadline, QueueFull, WorkerSpec
from serve.errors import ApiError, bad_request, check_model, internal_error, json_response
from serve.messages import Cancel, Draw, Drew, Followed, Part, ScorePrompt
from serve.metrics import ServerMetrics
from serve.prompts import Prompts
from serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.settings import MAX_SAMPLES
from serve.streaming import EventStream, while_connected

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_MOST_LOGPROBS = 1 << 20  # in one answer: each takes some hundred bytes
_GAP_S = 0.001
"""Least seconds between two events of a stream, times the number of open streams: the cost of events per second then
does not grow with the number of streams."""
Growth = list[tuple[Choice, str, list[ScoredToken]]]
"""Choices with their new text and new tokens."""


class DrawCall(Call):
    """The completions of one request; iterating waits for new tokens.

    Args:
        live: tokens are read as they arrive, else each completion when it has ended.
    """

    def __init__(self, uid: int, job: Draw, *, live: bool) -> None:
        super().__init__(uid)
        self.live, self.version = live, ""
        self.left = set(range(job.size))
        """Indices of the completions that have not ended."""
        self.running: set[int] = set()
        """Those of them that have tokens."""
        self.waits = True
        """False once it has tokens."""
        self._chunks: dict[int, Chunk] = {}  # that are not read yet, by index
        self._news = asyncio.Event()

    def __aiter__(self) -> DrawCall:
        return self

    async def __anext__(self) -> list[Chunk]:
        while True:
            if whole := [i for i, chunk in self._chunks.items() if self.live or chunk.finish is not None]:
                return [self._chunks.pop(i) for i in whole]
            if self.over.is_set():
                raise self.failure or StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def rest(self, seconds: float) -> None:
        """Lets tokens gather, for so long or to the end: each reading costs time, however many there are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    def end(self, failure: ApiError | None = None) -> None:
        super().end(failure)
        self._news.set()

    def add(self, index: int, *drawn: Any) -> None:
        """Adds what one step drew of a completion."""
        chunk = self._chunks.setdefault(index, Chunk(index))
        chunk.add(*drawn)
        if self.live or chunk.finish is not None:
            self._news.set()


class PolicySpec(WorkerSpec):
    """The routes that draw completions, of which the worker decodes ``size`` at once."""

    def __init__(self, model: ServedModel, *, size: int, deadline: float, max_queue: int) -> None:
        super().__init__(CHAT, deadline=deadline, max_queue=max_queue)
        self.model, self.size, self.metrics = model, size, ServerMetrics()
        self.prompts, self.version, self.not_followed = Prompts(model), model.version, ""
        self._texts = TokenTexts(model.tokenizer)
        self._streams = 0  # that are open
        self.add_route(CHAT, ChatRequest, self.chat)
        self.add_route("/v1/completions", CompletionRequest, self.completions)
        self.add_route("/tokenize", TokenizeRequest, self.tokenize)
        self.add_route("/detokenize", DetokenizeRequest, self.detokenize)

    # --- routes -----------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """OpenAI chat. With a grammar the template's prefill is left out, because it may not match."""
        check_model(body.model, self.model.name)
        free = body.grammar is None and not body.must_call
        prompt = await self.prompts.from_messages(body.messages, body.offered, prefill=free)
        prefill = self.model.template.prefill if free else ""
        return await self._answer(request, body, [prompt], [prefill], ChatFormat(self.model.name, body, self._texts))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """The same for plain prompts."""
        check_model(body.model, self.model.name)
        if not 1 <= len(body.prompts) * body.n <= 4 * MAX_SAMPLES:
            raise bad_request("prompt", f"give 1 to {4 * MAX_SAMPLES // body.n} prompts with n={body.n}.")
        prompts = [await self.prompts.from_raw(prompt) for prompt in body.prompts]
        decode = partial(self.model.tokenizer.decode, skip_special_tokens=False)
        echoed = [each if isinstance(each, str) else str(decode(each)) for each in body.prompts if body.echo]
        told = CompletionFormat(self.model.name, body, self._texts)
        return await self._answer(request, body, prompts, echoed or [""] * len(prompts), told)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Text or messages to token ids, in vLLM's format."""
        check_model(body.model, self.model.name)
        if body.messages is not None:
            ids = (await self.prompts.from_messages(body.messages, body.tools)).ids
        else:
            ids = await in_thread(self.prompts.of_text, str(body.prompt), body.add_special_tokens)
        names = self.model.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self.model.context, "tokens": ids, "token_strs": names}
        return await large_json_response(lambda: told)

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
        prompts: Sequence[EncodedPrompt],
        prefixes: Sequence[str],
        answer: ChoicesFormat,
    ) -> Response:
        """The answer as a stream, or whole; the work ends if the client hangs up."""
        deadline = Deadline(self.deadline)
        draw = self._draw(body, prompts)
        for part, prefix in zip(draw.parts, prefixes, strict=True):
            for _ in part.keys:
                reader = None
                if isinstance(body, ChatRequest) and body.offered:
                    tools = {tool.name: tool.for_template for tool in body.offered}
                    reader = CallReader(self.model.tools.parser, tools, several=body.parallel_tool_calls)
                stream = TextStream(self.model.tokenizer, body.stop, prefix=prefix, min_tokens=body.min_tokens)
                answer.choices.append(
                    Choice(
                        index=len(answer.choices),
                        stream=stream,
                        prompt=part.prompt_ids,
                        stop_token_ids=body.stop_token_ids,
                        reader=reader,
                        streams=body.stream,
                    )
                )
        if body.stream:
            return EventStream(request, self._events(draw, answer, deadline))
        return await while_connected(request, self._whole(draw, answer, deadline))

    def _draw(self, body: ChatRequest | CompletionRequest, prompts: Sequence[EncodedPrompt]) -> Draw:
        """Checks the fields that need the model."""
        grammar = self._grammar(body)
        if grammar is not None and body.max_thinking_tokens is not None:
            raise bad_request("max_thinking_tokens", "an answer that follows a grammar has no thought.")
        templated = isinstance(body, ChatRequest) and grammar is None
        logits, seed = self.prompts.logits(body), body.seed_or_random()
        self.prompts.check_ids(body.stop_token_ids, "stop_token_ids")
        parts: list[Part] = []
        for prompt in prompts:
            part = self.prompts.part(prompt, body, logits, seed=seed, templated=templated)
            stops, top = tuple(body.stop_token_ids), body.alternatives or 0
            options = replace(part.options, ignore_eos=body.ignore_eos, stop_token_ids=stops, top_logprobs=top)
            parts.append(part._replace(options=options))
        if body.alternatives is not None:
            tokens = body.n * sum(part.options.sampling.max_completion_length for part in parts)
            if isinstance(body, CompletionRequest) and body.echo:
                tokens += body.n * sum(len(prompt.ids) for prompt in prompts)
            if tokens * (1 + body.alternatives) > _MOST_LOGPROBS:
                asked = f"{tokens} tokens with {body.alternatives} likely ones each"
                message = f"{asked} are more than {_MOST_LOGPROBS:,} log-probabilities: ask for less at once."
                raise bad_request("logprobs", message)
        return Draw(parts, grammar)

    def _grammar(self, body: ChatRequest | CompletionRequest) -> Grammar | None:
        """The grammar that completions must match; None if they may be any text."""
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

    async def _whole(self, draw: Draw, answer: ChoicesFormat, deadline: Deadline) -> Response:
        async with aclosing(self._growth(draw, answer, deadline)) as steps:
            async for _ in steps:
                pass
        return await large_json_response(answer.whole)

    async def _events(self, draw: Draw, answer: ChoicesFormat, deadline: Deadline) -> AsyncGenerator[str, None]:
        """The events of a stream. A failure before the first event is raised, a later one becomes the last event."""
        started = False
        try:
            async with aclosing(self._growth(draw, answer, deadline)) as steps:
                async for grown in steps:
                    events: list[str] = []
                    if not started:
                        started = True
                        self.metrics.first_token.observe(deadline.spent())
                        events += map(answer.opening, answer.choices)
                    events += [answer.chunk(*growth) for growth in grown]
                    if all(choice.finish is not None for choice in answer.choices):
                        events.append(answer.closing())
                    if any(events):
                        yield "".join(events)
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, ApiError):
                log.error("a stream failed", exc_info=error)
                error = internal_error()
            yield event(error.body())

    async def _growth(self, draw: Draw, answer: ChoicesFormat, deadline: Deadline) -> AsyncGenerator[Growth, None]:
        """Draws completions and adds their tokens to the choices; yields lists of what arrived together."""
        body, choices = answer.request, answer.choices
        self.metrics.prompt_tokens.inc(sum(len(part.prompt_ids) for part in draw.parts))
        if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
            for p, part in enumerate(draw.parts):
                question = ScorePrompt(part.prompt_ids, part.options.top_logprobs)
                scored = await self.ask(question, deadline=deadline)
                for choice in choices[p * body.n : (p + 1) * body.n]:
                    choice.echoed = scored
        if body.length == 0:
            answer.system_fingerprint = self.version
            for choice in choices:
                choice.finish = "length"
            yield [(choice, "", []) for choice in choices]
            return
        live = body.stream or bool(body.stop) or any(choice.ends_early for choice in choices)
        with self.draw(draw, deadline=deadline, live=live) as call:
            async for chunks in call:
                answer.system_fingerprint = call.version
                # what was drawn after a stop string, before the worker was told to stop, is left out
                going = [chunk for chunk in chunks if choices[chunk.index].finish is None]
                grown = [(choices[chunk.index], *choices[chunk.index].push(chunk)) for chunk in going]
                self.metrics.generated_tokens.inc(sum(len(tokens) for _, _, tokens in grown))
                if stopped := {choice.index for choice, _, _ in grown if choice.stream.stopped} & call.left:
                    self._stop(call, stopped)
                if grown:
                    yield grown
                await call.rest(_GAP_S * self._streams)

    # --- the worker's answers ---------------------------------------------------------------------------------------

    @contextmanager
    def draw(self, job: Draw, *, deadline: Deadline, live: bool) -> Iterator[DrawCall]:
        """Context manager: the completions of a job join the batch as they get slots; leaving it early cancels them.

        Raises:
            ApiError: see `ask`, also while reading; ``QueueFull``: too many requests wait.
        """
        if self.waiting >= self.max_queue + max(0, self.size - self.running):
            raise QueueFull(self.waiting)
        with self.registered(DrawCall(next(self._uids), job, live=live), deadline) as call:
            self._streams += live
            try:
                self.send(call.uid, job)
                yield call
            finally:
                self._streams -= live

    @property
    def drawing(self) -> list[DrawCall]:
        """The requests whose completions have not all ended."""
        return [call for call in self.calls.values() if isinstance(call, DrawCall)]

    @property
    def running(self) -> int:
        """Number of completions that are being drawn."""
        return sum(len(call.running) for call in self.drawing)

    @property
    def waiting(self) -> int:
        """Number of requests that have no token yet."""
        return sum(call.waits for call in self.drawing)

    def handle(self, message: Any) -> None:
        if isinstance(message, Drew):
            self._hand_out(message)
        elif isinstance(message, Followed):
            self.version, self.not_followed = message.version or self.version, message.error
        else:
            super().handle(message)

    def _hand_out(self, drew: Drew) -> None:
        """Gives the tokens of one step to their calls."""
        for uid, i, *drawn, finish in zip(*drew.columns, strict=True):
            call = self.calls.get(uid)
            if not isinstance(call, DrawCall) or i not in call.left:
                continue  # cancelled meanwhile
            call.version, call.waits = drew.version, False
            call.running.add(i)
            call.add(i, *drawn, finish)
            if finish is not None:
                self._finish(call, {i})

    def _stop(self, call: DrawCall, indices: set[int]) -> None:
        """Stops the drawing of the completions with these indices."""
        if call.uid in self.calls:
            self.send(call.uid, Cancel(frozenset(indices)))
            self._finish(call, indices)

    def _finish(self, call: DrawCall, indices: set[int]) -> None:
        call.left -= indices
        call.running -= indices
        if not call.left:
            del self.calls[call.uid]
            call.end()
