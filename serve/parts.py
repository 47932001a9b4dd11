"""``PolicyAPI`` and ``RewardAPI``: a trained policy and its rewards as parts of your own ``litserve.LitServer``."""

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

from fastapi import BackgroundTasks, HTTPException, Response
from litserve import LitAPI, OpenAISpec
from litserve.specs.openai import ChatCompletionRequest, ChatMessage
from pydantic import ConfigDict, ValidationError

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.trained import ServedModel, find_model, without_link
from grpo_pl.processes import resource_limits
from serve.answers import usage_of
from serve.completions import CompletionRoutes
from serve.errors import ApiError, bad_request, from_fault
from serve.generate_worker import GenerateWorker
from serve.generator import Generator
from serve.metrics import ServerMetrics
from serve.prompts import Prompts
from serve.schemas import ChatRequest, ScoreRequest
from serve.score_worker import ScoreWorker
from serve.scoring import Scorer, ScoreRoute, needed_columns
from serve.settings import MAX_SAMPLES
from serve.weights import Weights
from serve.worker_channel import FrontChannel, WorkerTask
from serve.worker_client import WorkerClient

log = logging.getLogger(__name__)

_CHAT, _SCORE = "/v1/chat/completions", "/v1/score"
_NO_PLACE = ("logprobs", "tools", "response_format", "structured_outputs", "return_token_ids")
"""Fields of a chat whose effect the answers of LitServe's spec have no place for."""


class _Message(ChatMessage):
    """LitServe's message, which here keeps the fields that it would drop, those of parts and calls included."""

    model_config = ConfigDict(extra="allow")
    content: Any = None
    tool_calls: Any = None


class ChatBody(ChatCompletionRequest):
    """LitServe's request, which here keeps the fields that it would drop: the policy's own check refuses unknown
    ones."""

    model_config = ConfigDict(extra="allow")
    messages: list[_Message]  # type: ignore[assignment]  # a list of what is more special


class ChatSpec(OpenAISpec):
    """LitServe's OpenAI spec; what it would answer wrongly is refused with 400, see docs/serving.md."""

    async def chat_completion(self, request: ChatBody, background_tasks: BackgroundTasks) -> Any:
        count, extra = 1 if request.n is None else request.n, request.model_extra or {}
        if not 1 <= count <= MAX_SAMPLES:
            raise HTTPException(400, f"n: give 1 to {MAX_SAMPLES}, not {count}.")
        if count > 1 and (request.stream or extra.get("seed") is not None):
            raise HTTPException(400, "n: LitServe's spec makes n requests of it: give 1 with stream or seed.")
        request.n = count  # LitServe counts to it, also where it is null
        return await super().chat_completion(request, background_tasks)

    async def streaming_completion(self, request: ChatBody, pipe_responses: list[Any]) -> AsyncIterator[str]:
        async for event in super().streaming_completion(request, pipe_responses):
            yield event if event.endswith("\n\n") else f"{event}\n\n"  # an error has no end, and clients would drop it


class _Part(LitAPI):
    """Runs a worker's task in a thread of LitServe's worker process, and asks it as the front process of
    ``grpo-pl serve`` does."""

    def __init__(self, model: str | Path, *, max_queue: int, deadline: float, trust: bool, **api: Any) -> None:
        check_at_least(1, type(self).__name__, max_queue=max_queue)
        if not (math.isfinite(deadline) and deadline > 0):
            raise ValueError(f"{type(self).__name__} needs a positive number of seconds as deadline, got {deadline}.")
        super().__init__(enable_async=True, **api)
        self.model: ServedModel = without_link(find_model(Path(model), trust_rewards=trust))
        self._max_queue, self._deadline = max_queue, deadline

    def _host(self, task: WorkerTask, client: WorkerClient) -> None:
        """Prepares a task and starts its thread."""
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            resource_limits.end_with_parent(parent.pid)  # LitServe leaves workers behind when its own process is killed
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and LitServe's first ends this
        task.prepare()
        self._client, self._connecting = client, asyncio.Lock()
        end, theirs = socket.socketpair()
        self._end: socket.socket | None = end
        threading.Thread(target=_work, args=(task, FrontChannel(theirs)), name="work", daemon=True).start()

    async def _connect(self) -> None:
        """Connects the client to the task on the event loop of LitServe's worker, which there is from the first request
        on."""
        async with self._connecting:
            if self._end is not None:
                end, self._end = self._end, None
                await asyncio.get_running_loop().create_unix_connection(lambda: self._client, sock=end)


def _work(task: WorkerTask, front: FrontChannel) -> None:
    try:
        task.work(front)
    except SystemExit:  # the event loop that asked has ended
        return
    except Exception:
        log.exception("the work of this process failed; it ends")
        os._exit(1)  # LitServe's monitor then ends the server, in place of requests that wait for ever


class PolicyAPI(_Part):
    """Answers chats with a trained policy, decoding all requests of a worker in one continuous batch.

    Args:
        model: an exported folder, a run folder, or a checkpoint of a run.
        spec: ``auto`` answers by LitServe's OpenAI spec; None in the format of ``grpo-pl serve``, which has ``n`` with
            streams and seeds, log-probabilities and finish reasons, but as LitServe's stream without a content type.
        api_path: the route; the spec has its own.
        max_completions: completions decoded at once.
        max_queue: requests that may wait for a slot of the batch; further ones get 429.
        deadline: seconds after which an unfinished request fails with 504.
        trust_rewards: as in ``grpo-pl serve``.

    Raises:
        ValueError: there is no model, or it cannot be served; or a limit is not positive.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        spec: OpenAISpec | Literal["auto"] | None = "auto",
        api_path: str = _CHAT,
        max_completions: int = 64,
        max_queue: int = 128,
        deadline: float = 120.0,
        trust_rewards: bool = False,
    ) -> None:
        check_at_least(1, type(self).__name__, max_completions=max_completions)
        chosen = ChatSpec() if spec == "auto" else spec
        limits: dict[str, Any] = {"max_queue": max_queue, "deadline": deadline}
        super().__init__(model, **limits, trust=trust_rewards, api_path=api_path, stream=True, spec=chosen)
        self._by_spec, self._size = chosen is not None, max_completions

    def setup(self, device: str) -> None:
        if not isinstance(device, str):
            raise ValueError(f"a policy is decoded on one device, not on {device}: give LitServer a number of devices.")
        generator = Generator(max_batch_size=self._size, max_queue=self._max_queue)
        self._routes = CompletionRoutes(
            generator=generator,
            grammars=None,
            weights=Weights(generator, self.model),
            prompts=Prompts(self.model),
            metrics=ServerMetrics(),
            deadline_s=self._deadline,
        )
        self._host(GenerateWorker(self.model, device=device, max_batch_size=self._size), generator)

    async def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe makes a JSON schema of a type,
        return request

    async def encode_response(self, output):  # type: ignore[no-untyped-def]  # … and here a response's
        async for part in output:
            yield part

    async def predict(self, request: ChatBody | Any) -> AsyncGenerator[dict[str, Any] | str, None]:
        await self._connect()
        try:
            answers = self._by_litserve(request) if self._by_spec else self._by_us(request)
            async with aclosing(answers):
                async for answer in answers:
                    yield answer
        except ApiError as error:
            if self._by_spec:
                raise _for_litserve(error) from None
            told = bytes(error.response().body).decode()  # LitServe would end the stream without a word
            yield f"data: {told}\n\n" if isinstance(request, dict) and request.get("stream") else told

    async def _by_litserve(self, request: ChatBody) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks that LitServe's spec makes an answer of; the last has the usage, because it adds those of all."""
        body = _parsed(request.model_dump(exclude_unset=True))
        refused = next((name for name in _NO_PLACE if getattr(body, name)), None)
        if refused is not None:
            why = "LitServe's spec has no place for it: PolicyAPI(…, spec=None) or grpo-pl serve has."
            raise bad_request(refused, why, code="unsupported_parameter")
        job = await self._routes.chat_job(body)
        (choice,), message = job.choices, {"role": "assistant"}
        if choice.opening:
            yield {**message, "content": choice.opening}
        async with aclosing(self._routes.growth(job)) as steps:
            async for grown in steps:
                if text := "".join(text for _, text, _ in grown):
                    yield {**message, "content": text}
        yield {**message, "content": "", **usage_of(job.choices, body.n)}

    async def _by_us(self, request: Any) -> AsyncGenerator[str, None]:
        """The answer of ``grpo-pl serve``: its events, or all of it."""
        job = await self._routes.chat_job(_parsed(request))
        if not job.request.stream:
            yield bytes((await self._routes.whole(job)).body).decode()
            return
        async with aclosing(self._routes.events(job)) as events:
            async for event in events:
                yield event


def _for_litserve(error: ApiError) -> HTTPException:
    """The exception of FastAPI's, of which LitServe keeps the status; of Starlette's it makes a 500."""
    return HTTPException(error.status, error.message)


def _parsed(request: Any) -> ChatRequest:
    try:
        return ChatRequest.model_validate(request)
    except ValidationError as error:
        raise from_fault(error.errors()[0]) from None


class RewardAPI(_Part):
    """Scores completions with the rewards of a trained policy, as ``POST /v1/score`` of ``grpo-pl serve`` does. The
    requests of a worker are scored at the same time and take turns in its sandbox.

    Args:
        model: an exported folder, a run folder, or a checkpoint of a run.
        api_path: the route.
        max_queue: requests that may wait; further ones get 429.
        deadline: seconds after which an unfinished request fails with 504.
        trust_rewards: as in ``grpo-pl serve``.

    Raises:
        ValueError: there is no model, or a reward cannot be built; or a limit is not positive.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        api_path: str = _SCORE,
        max_queue: int = 128,
        deadline: float = 120.0,
        trust_rewards: bool = False,
    ) -> None:
        super().__init__(model, max_queue=max_queue, deadline=deadline, trust=trust_rewards, api_path=api_path)
        self._needs = needed_columns(self.model)

    def setup(self, device: str) -> None:
        scorer = Scorer(max_queue=self._max_queue)
        self._route = ScoreRoute(
            model=self.model,
            needs=self._needs,
            scorer=scorer,
            metrics=ServerMetrics(),
            deadline_s=self._deadline,
            max_queue=self._max_queue,
        )
        self._host(ScoreWorker(self.model.rewards, trust_rewards=self.model.trust_rewards), scorer)

    async def decode_request(self, request: ScoreRequest) -> ScoreRequest:
        return request

    async def predict(self, body: ScoreRequest) -> Response:
        await self._connect()
        try:
            return await self._route.answer(body)
        except ApiError as error:
            raise _for_litserve(error) from None

    async def encode_response(self, output: Response) -> Response:
        return output
