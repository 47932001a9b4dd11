"""The routes of an engine's server: what is read of a request, and how its answer is streamed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.engine import EngineDied, PolicyDiverged, RolloutInterrupted
from grpo_pl.rollout.remote import wire
from grpo_pl.rollout.remote.refusals import Guard, Refusal, answered, on_bug, on_refusal, too_large
from grpo_pl.rollout.remote.seat import Arriving, Lost, Seat
from grpo_pl.rollout.remote.settings import ServerSettings
from grpo_pl.rollout.remote.weight_files import MOST_FILES, NoFile, WeightFiles
from grpo_pl.rollout.remote.wire import Malformed
from grpo_pl.types import StopStrings

log = logging.getLogger(__name__)
T = TypeVar("T")

_TELL_EVERY_S = 0.2
_BODY_S = 60.0
"""Most seconds between two pieces of a push, and for the whole of another body."""
_BODIES = 4
"""Bodies of JSON that are read at a time; others wait."""
_TOKENIZER_BYTES = 2**27
KINDS: dict[type[Exception], str] = {
    EngineDied: "died",
    Lost: "lost",
    PolicyDiverged: "diverged",
    RolloutInterrupted: "stopped",
    ValueError: "refused",
}
"""What an error is called in an answer; any other has ``failed``."""


class EngineRoutes:
    """The routes of one engine.

    Args:
        engine: whose worker draws.
    """

    def __init__(self, engine: ChildEngine, settings: ServerSettings) -> None:
        self._settings, self._engine = settings, engine
        self.seat = Seat(engine, settings)
        self._bodies = asyncio.Semaphore(_BODIES)
        session = "/v1/sessions/{session}"
        routes = [
            Route("/health", self._health),
            Route("/v1/engine", self._about),
            Route(session, self._open, methods=["PUT"]),
            Route(session, self._renew, methods=["POST"]),
            Route(session, self._leave, methods=["DELETE"]),
            Route(session + "/weights/{mark}", self._load, methods=["PUT"]),
            Route(session + "/tokenizers/{key}", self._keep_tokenizer, methods=["PUT"]),
            Route(session + "/generate", self._generate, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {HTTPException: on_refusal, Exception: on_bug}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        self.app = Guard(app, settings.token)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self.seat.watch())
        yield
        watch.cancel()

    # --- routes -----------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _about(self, request: Request) -> Response:
        return JSONResponse(
            {
                "engine": type(self._engine).__name__,
                "max_tokens": self._engine.max_tokens,
                "dtype": getattr(self._engine, "dtype", None),
                "lease_s": self._settings.lease_s,
                "reads_files": self._settings.weights_folder is not None,
            }
        )

    async def _open(self, request: Request) -> Response:
        asked, name = await self._json(request), _session(request)
        policy, mark, who = asked.get("policy"), asked.get("mark"), asked.get("who", "")
        if not isinstance(policy, dict) or not isinstance(mark, str | None) or not isinstance(who, str):
            raise Refusal(400, "a session is opened with a policy, a mark or null, and a name.", "malformed")
        with answered():
            self.seat.claim(name)
        return _streamed(self.seat.open(name, policy, mark, who), lambda state: wire.event("done", **state))

    async def _renew(self, request: Request) -> Response:
        with answered():
            self.seat.renew(_session(request), request.query_params.get("who"))
        return JSONResponse({})

    async def _leave(self, request: Request) -> Response:
        self.seat.leave(_session(request))
        return JSONResponse({})

    async def _load(self, request: Request) -> Response:
        name, mark = _session(request), request.path_params["mark"]
        with answered():
            self.seat.renew(name)
            end = self.seat.begin_push(name)
        try:
            if _content_type(request) == "application/json":
                files = await self._files(await self._json(request))
                push = asyncio.create_task(self.seat.load(name, mark, files.read))
            else:
                push = await self._arriving(request, name, mark)
        except BaseException:
            end()
            raise
        push.add_done_callback(lambda _: end())
        return _streamed(push, lambda _: wire.event("done", mark=mark))

    async def _arriving(self, request: Request, name: str, mark: str) -> asyncio.Task[None]:
        """A push by the request's body, all of which has arrived, or which is over before."""
        arriving, push = Arriving(), None
        try:
            async for bucket in self._buckets(request):
                if push is None:  # a body that is no push costs no worker
                    push = asyncio.create_task(self.seat.load(name, mark, arriving.read))
                await arriving.put(bucket, push)
                if push.done():
                    return push
            if push is None:
                raise Refusal(400, "a push must hold weights.", "malformed")
            await arriving.put(None, push)
        except BaseException as error:
            arriving.broken.set()
            if push is not None:
                push.add_done_callback(_heard)
            if not isinstance(error, ClientDisconnect | TimeoutError | Refusal):
                raise
            if push is not None:
                await asyncio.wait({push})
            log.warning("a push broke off: %s", error or "the client is gone")
            raise error if isinstance(error, Refusal) else Refusal(400, "the push broke off.", "broke_off") from None
        return push

    async def _keep_tokenizer(self, request: Request) -> Response:
        name, key = _session(request), request.path_params["key"]
        with answered():
            self.seat.renew(name)
        kept = await self._read(request, lambda body: _tokenizer(body, key), most=_TOKENIZER_BYTES)
        with answered():
            self.seat.keep_tokenizer(name, key, kept)
        return JSONResponse({})

    async def _generate(self, request: Request) -> Response:
        name = _session(request)
        with answered():
            self.seat.renew(name)
            vocabulary, longest = self.seat.limits(name)
        asked = await self._read(
            request, lambda body: wire.Request.parsed(body, vocabulary=vocabulary, longest=longest)
        )
        stops = None
        if asked.stops is not None:
            with answered():
                try:
                    tokenizer = self.seat.tokenizer(name, asked.stops.tokenizer)
                except KeyError:
                    raise Refusal(409, "there is no such tokenizer here: send it first.", "tokenizer") from None
            stops = StopStrings(texts=asked.stops.texts, tokenizer=tokenizer, prefix=asked.stops.prefix)
        told: list[tuple[int, int]] = [(0, 0)]
        stop = threading.Event()
        draw = self.seat.generate(
            name,
            asked.mark,
            asked.to_engine(stops),
            progress=lambda *now: told.__setitem__(0, now),
            stop=stop,
        )

        def drawn(rollout: Any) -> bytes:
            head, data = wire.rollout_parts(rollout, asked.mark)
            return wire.event("done", data, **head)

        return _streamed(draw, drawn, tell=lambda: {"tokens": told[0][0], "finished": told[0][1]}, gone=stop.set)

    # --- bodies -----------------------------------------------------------------------------------------------------

    async def _pieces(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        stream, size = aiter(request.stream()), 0
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large(limit)
        while True:
            async with asyncio.timeout(_BODY_S):
                piece = await anext(stream, None)
            if piece is None:
                return
            size += len(piece)
            if size > limit:
                raise too_large(limit)
            yield piece

    async def _read(self, request: Request, parse: Callable[[bytes], T], *, most: int = 0) -> T:
        """What ``parse``, in a thread, makes of a body of JSON; a few bodies at a time are held.

        Args:
            most: bytes, where that is more than other bodies may have.
        """
        if _content_type(request) != "application/json":
            raise Refusal(415, "the body must be application/json.", "media_type")
        async with self._bodies:
            limit = max(most, self._settings.max_request_mb << 20)
            try:
                async with asyncio.timeout(_BODY_S):
                    body = b"".join([piece async for piece in self._pieces(request, limit)])
            except TimeoutError:
                raise Refusal(408, f"the body did not arrive within {_BODY_S:g} s.", "timeout") from None
            except ClientDisconnect:
                raise Refusal(400, "the body broke off.", "broke_off") from None
            with answered():
                return await asyncio.to_thread(parse, body)

    async def _json(self, request: Request) -> dict[str, Any]:
        return await self._read(request, _object)

    async def _buckets(self, request: Request) -> AsyncIterator[dict[str, Tensor]]:
        """The buckets of a push, all of them.

        Raises:
            Refusal: it is none, or has no end.
        """
        held, head, ended = bytearray(), wire.LENGTH_BYTES, False
        limit = left = int(self._settings.max_weights_gib * 2**30)
        async for piece in self._pieces(request, limit):
            held += piece
            while not ended and len(held) >= head:
                size = int.from_bytes(held[:head], "big")
                if head + size > left:  # of what was announced nothing is waited for
                    raise too_large(limit)
                with answered():
                    wire.check_bucket(held, size)
                if len(held) < head + size:
                    break
                if ended := size == 0:
                    del held[:head]
                    break
                with memoryview(held) as view:
                    data = bytes(view[head : head + size])
                del held[: head + size]
                left -= head + size
                with answered():
                    bucket = await asyncio.to_thread(wire.unpacked, data)
                del data
                yield bucket
                del bucket
            if ended and held:
                raise Refusal(400, "the push goes on behind its end.", "malformed")
        if not ended:
            raise Refusal(400, "the push has no end: weights are missing.", "broke_off")

    async def _files(self, asked: dict[str, Any]) -> WeightFiles:
        """Files of weights inside the folder.

        Raises:
            Refusal: there is no folder, or one is not in it.
        """
        folder, names = self._settings.weights_folder, asked.get("files")
        if folder is None:
            raise Refusal(403, "this server reads no files: start it with --weights-folder.", "no_folder")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise Refusal(400, "files must be names of files in the server's folder.", "malformed")
        if len(names) > MOST_FILES:
            raise Refusal(400, f"files must be at most {MOST_FILES}, got {len(names)}.", "malformed")
        files = WeightFiles(folder=folder, names=names, limit=int(self._settings.max_weights_gib * 2**30))
        try:
            with answered():
                await asyncio.to_thread(files.check)
        except NoFile as error:
            raise Refusal(400, str(error), "no_file") from None
        return files


def _session(request: Request) -> str:
    """The run's name for itself, which stands in the server's log."""
    name = str(request.path_params["session"])
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise Refusal(400, "the name of a session must be 32 digits of base 16.", "malformed")
    return name


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise Malformed("the body must be a JSON object.")
    return value


def _tokenizer(body: bytes, key: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    asked = _object(body)
    text, clean_up = asked.get("tokenizer"), asked.get("clean_up") is True
    if not isinstance(text, str) or key != wire.tokenizer_name(text, clean_up):
        raise Malformed("a tokenizer is a text that is sent under its digest.")
    try:
        whole = Tokenizer.from_str(text)
        return PreTrainedTokenizerFast(tokenizer_object=whole, clean_up_tokenization_spaces=clean_up)
    except BaseException as error:  # the library's own; its panics are no Exception
        raise Malformed(f"this is no tokenizer: {' '.join(str(error).split())[:200]}") from None


def _streamed(
    work: Awaitable[Any],
    done: Callable[[Any], bytes],
    *,
    tell: Callable[[], dict[str, Any]] = dict,
    gone: Callable[[], None] = lambda: None,
) -> Response:
    """Lines while ``work`` goes on, so that both sides notice when the other is gone, and its result.

    Args:
        tell: what the lines say.
        gone: called when the client is.
    """
    task = asyncio.ensure_future(work)

    async def lines() -> AsyncIterator[bytes]:
        try:
            while not task.done():
                yield wire.event("progress", **tell())
                await asyncio.wait({task}, timeout=_TELL_EVERY_S)
            yield wire.event("progress", **tell())
            try:
                yield await asyncio.to_thread(done, task.result())
            except Exception as error:
                kind = _kind(error)
                message = str(error) if kind != "failed" else (str(error).splitlines() or [""])[-1]
                yield wire.event("error", error=kind, message=message or type(error).__name__)
        finally:
            if not task.done():  # it ends by itself, and holds what it needs until then
                gone()
                task.add_done_callback(_heard)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="application/octet-stream", headers=headers)


def _heard(ended: asyncio.Future[Any]) -> None:
    """Of an error that nobody is left to be told; asyncio would print it."""
    if not ended.cancelled():
        ended.exception()


def _kind(error: Exception) -> str:
    kind = next((name for kind, name in KINDS.items() if isinstance(error, kind)), "failed")
    if kind == "failed":
        log.error("a request failed", exc_info=error)
    return kind


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
