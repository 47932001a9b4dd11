"""``AgentSession``: the chat completions that one agent asks for, over HTTP on this machine alone."""

from __future__ import annotations

import hashlib
import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from socketserver import TCPServer
from typing import Any, NamedTuple

from pydantic import ValidationError

from grpo_pl.environment import EpisodeEnded, Observation, text_of
from grpo_pl.extras.agents.call_reader import CallReader
from grpo_pl.extras.agents.tool_calls import Call, CallParser, Result
from grpo_pl.openai_format import answers
from grpo_pl.openai_format.fields import field_fault
from grpo_pl.openai_format.json_text import MalformedJson, parse_object
from grpo_pl.openai_format.messages import AgentRequest, Message

MODEL = "policy"
"""Name of the model for agents; they may ask for any other as well."""
_LONGEST_BODY = 32 << 20
_FULL = "context_length_exceeded"  # at which frameworks end a conversation and still score it


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    body: str
    kind: str = "application/json"


def refusal(status: int, message: str, *, code: str, param: str | None = None) -> Reply:
    return Reply(status, json.dumps(answers.error_body(status, message[:500], code=code, param=param)))


@dataclass(eq=False)
class AgentCall:
    """A chat request that waits for the policy's answer."""

    request: AgentRequest
    reply: Future[Reply] = field(default_factory=Future)


class _Said(NamedTuple):
    """A message as two requests are compared by: blanks around a text and ids of calls differ between clients."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: Message) -> _Said:
        calls = tuple((c.function.name, json.dumps(c.arguments, sort_keys=True)) for c in message.tool_calls)
        return cls("system" if message.role == "developer" else message.role, message.text.strip(), calls)


@dataclass
class _Conversation:
    """What was said so far, up to an answer of the policy, and the tools that were offered."""

    tools: list[dict[str, Any]]
    said: list[_Said] = field(default_factory=list)

    def fault(self, said: Sequence[_Said], tools: Sequence[Mapping[str, Any]]) -> str:
        """The reason for which a call does not continue it; empty if it does."""
        known = len(self.said)
        if tools != self.tools:
            return "a call has other tools than the first."
        if said[:known] != self.said or len(said) == known:
            at = next((i for i, (a, b) in enumerate(zip(said, self.said, strict=False)) if a != b), len(said))
            told = f"message {at} of a call is not that of the call before" if at < len(said) else "a call ends earlier"
            return f"{told}: edited history, or calls at the same time."
        if any(one.role == "assistant" for one in said[known:]):
            return "a call has an answer that the policy did not write."
        return ""


class AgentSession:
    """The conversations between an agent and the policy: one, unless ``branches`` allows more.

    ``events`` gets an `AgentCall` for each request that the policy has to answer, in the order of their arrival. A
    request that is sent again (openai's clients count in ``x-stainless-retry-count``) gets the answer of the first.

    Args:
        parser: reads calls of tools in what the policy writes.
        takes_reward: whether ``POST /v1/reward`` is open, to the bearer of ``reward_key``.
        branches: a call that continues no conversation begins another; else it ends the session.
    """

    def __init__(self, parser: CallParser, *, takes_reward: bool, branches: bool = False) -> None:
        self.parser, self.takes_reward, self.branches = parser, takes_reward, branches
        self.key, self.reward_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reward: float | None = None
        self.warnings: list[str] = []
        """What is told once; taken by the environment."""
        self.over = ""
        """The limit that was reached; all further calls are refused with it."""
        self._lock = threading.Lock()
        self._calls: dict[bytes, AgentCall] = {}  # the latest of each content
        self._unanswered: set[AgentCall] = set()
        self._conversations: list[_Conversation] = []
        self.conversation = 0
        """The number of the one that the latest call is in."""
        self.begins = True
        """That call began it."""
        self.answers = 0
        """Answers of the policy so far."""
        self.unsupported = ""
        """The first refusal of a field that we do not support; the agent's fault, and never the policy's."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.session = self

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def serve(self) -> None:
        """Starts the threads; a process that forks does so before."""
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 60.0}, daemon=True).start()

    # what arrives: in threads of the server

    def respond(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The response to a request; for a chat request after the policy has answered."""
        bearer = str(headers.get("Authorization", "")).removeprefix("Bearer ").strip()
        route = (method, path.partition("?")[0].rstrip("/").removeprefix("/v1"))
        if route == ("POST", "/reward"):
            return self._rewarded(bearer, body)
        if not _equal(bearer, self.key):
            return refusal(401, "this is not the key of this session.", code="invalid_api_key")
        if route == ("GET", "/models"):
            return Reply(200, json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        if route != ("POST", "/chat/completions"):
            return refusal(404, f"{method} {path}: agents have /v1/chat/completions here.", code="route_not_found")
        try:
            request = AgentRequest.model_validate(parse_object(body))
        except MalformedJson as error:
            return refusal(400, error.message, code=error.code)
        except ValidationError as error:
            message, param, code = field_fault(error.errors(include_url=False, include_input=False)[0])
            where = param or ""
            of_a_part = where.startswith("messages.") and (where.endswith(".type") or ".image_url" in where)
            if code in ("unsupported_parameter", "unknown_parameter") or of_a_part:
                self.unsupported = self.unsupported or f"the refusal of a request: {message}"[:200]
            return refusal(400, message, code=code, param=param)
        return self._asked(request, body, again=str(headers.get("x-stainless-retry-count", "0")) != "0")

    def _asked(self, request: AgentRequest, body: bytes, *, again: bool) -> Reply:
        digest = hashlib.sha256(body).digest()
        with self._lock:
            if self.over:
                return refusal(400, self.over, code=_FULL)
            call = self._calls.get(digest) if again else None
            if call is None:
                call = self._calls[digest] = AgentCall(request)
                self._unanswered.add(call)
                for name in request.in_vain:
                    self._warn(f"an agent sets {name}, which has no effect: sampling is the run's.")
                self.events.put(call)
        return call.reply.result()

    def _rewarded(self, bearer: str, body: bytes) -> Reply:
        if not self.takes_reward or not _equal(bearer, self.reward_key):
            with self._lock:
                self._warn("a reward without the session's reward key was refused.")
            return refusal(401, "this is not the reward key of this session.", code="invalid_api_key")
        try:
            value = parse_object(body).get("reward")
            self.pay(value)
        except MalformedJson as error:
            return refusal(400, error.message, code=error.code)
        except ValueError as error:
            return refusal(400, str(error), code="reward_refused", param="reward")  # OpenAI's clients retry a 409
        return Reply(200, "{}")

    def pay(self, value: Any) -> None:
        """Sets the reward.

        Raises:
            ValueError: it is no finite number, or there is one already.
        """
        with self._lock:
            if isinstance(value, str) or not _is_finite(value):
                raise ValueError(f"a reward must be a finite number, got {value!r:.80}.")
            if self.reward is not None:
                self._warn(f"a second reward of a session, {float(value):g}, was refused.")
                raise ValueError(f"this session has its reward, {self.reward:g}.")
            self.reward = float(value)

    def _warn(self, text: str) -> None:
        if text not in self.warnings and len(self.warnings) < 8:
            self.warnings.append(text)

    # what the policy reads and writes: in the thread of the environment

    def observation(self, request: AgentRequest) -> Observation:
        """What a call adds to the longest conversation that it continues: all of it where it begins one.

        Raises:
            EpisodeEnded: it should continue the only conversation and does not (``rewritten``).
        """
        said, tools = list(map(_Said.of, request.messages)), [tool.for_template for tool in request.tools]
        faults = [each.fault(said, tools) for each in self._conversations]
        fitting = [number for number, fault in enumerate(faults) if not fault]
        self.begins = not fitting
        if fitting:
            self.conversation = max(fitting, key=lambda number: len(self._conversations[number].said))
        elif faults and not self.branches:
            raise EpisodeEnded("rewritten", faults[0], "environment")
        else:
            self.conversation = len(self._conversations)
            self._conversations.append(_Conversation(tools))
        known = len(self._conversations[self.conversation].said)
        names = {call.id: call.function.name for message in request.messages for call in message.tool_calls}
        self._conversations[self.conversation].said = said
        return turns(request.messages[known:], names, self.parser, first=self.begins)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Those of that conversation."""
        return self._conversations[self.conversation].tools

    def answer(self, call: AgentCall, action: str, drawn: Mapping[str, Any]) -> bool:
        """Sends the policy's action as the answer to a call; true if a call of a tool in it is malformed."""
        request, action = call.request, str(drawn.get("before_stop", action))
        offered = {tool.name: tool.for_template for tool in request.offered}
        reader = CallReader(self.parser, offered, several=request.parallel_tool_calls) if offered else None
        text = action if reader is None else reader.push(action, final=True)
        calls = [] if reader is None else reader.calls
        said = tuple((made.name, json.dumps(json.loads(made.arguments), sort_keys=True)) for made in calls)
        self._conversations[self.conversation].said.append(_Said("assistant", text.strip(), said))
        self.answers += 1
        calls = [made._replace(id=f"call_{self.answers}_{at}") for at, made in enumerate(calls)]  # equal in each run
        reason = "tool_calls" if calls else "length" if drawn.get("finish_reason") == "length" else "stop"
        usage = answers.usage(int(drawn.get("prompt_tokens", 0)), int(drawn.get("completion_tokens", 0)))
        with self._lock:
            self._unanswered.discard(call)
        call.reply.set_result(_written(request, text, calls, reason, usage, number=self.answers))
        return any(found.fault for found in self.parser.calls(action, offered)) if offered else False

    def end(self, limit: str) -> None:
        """Refuses all calls from now on, those that wait among them."""
        with self._lock:
            self.over = limit
            for call in self._unanswered:
                call.reply.set_result(refusal(400, limit, code=_FULL))
            self._unanswered.clear()

    def close(self) -> None:
        self._server.socket.close()


def turns(
    messages: Sequence[Message], names: Mapping[str, str], parser: CallParser, *, first: bool = False
) -> Observation:
    """Messages in the form of the policy's training: calls and results as the parser writes them.

    Args:
        names: id -> the name of the called tool.
        first: they are a whole conversation, which is always given as messages.
    """
    told: list[Mapping[str, Any]] = []
    for are_results, those in groupby(messages, key=lambda message: message.role == "tool"):
        if are_results:
            observed = parser.observation([Result(names.get(m.tool_call_id or "", ""), m.text) for m in those])
            told += [{"role": "user", "content": observed}] if isinstance(observed, str) else observed
            continue
        for message in those:
            calls = [parser.written(Call(c.function.name, c.arguments)) for c in message.tool_calls]
            role = "system" if message.role == "developer" else message.role
            told.append({"role": role, "content": message.text + "\n".join(calls)})
    if first or len(told) > 1 or told[0]["role"] != "user":
        return told
    return text_of(told)


def _written(
    request: AgentRequest,
    text: str,
    calls: Sequence[answers.MadeCall],
    reason: str,
    usage: Mapping[str, int],
    *,
    number: int,
) -> Reply:
    """The answer in the form that the request asks for."""
    model, now = request.model or MODEL, int(time.time())
    head = partial(answers.head, id=f"chatcmpl-{number}", created=now, model=model, fingerprint="")
    choice = {"index": 0, "logprobs": None, "finish_reason": reason}
    if not request.stream:
        whole = head("chat.completion") | {"choices": [{**choice, "message": answers.assistant_message(text, calls)}]}
        return Reply(200, json.dumps({**whole, "usage": usage}))
    chunk = head("chat.completion.chunk")
    deltas = [({"role": "assistant", "content": ""}, None), (answers.delta(text, list(enumerate(calls))), None)]
    parts: list[dict[str, Any]] = [
        {**chunk, "choices": [{**choice, "delta": delta, "finish_reason": end}]}
        for delta, end in [*deltas, ({}, reason)]
    ]
    if request.stream_options.include_usage:
        parts.append({**chunk, "choices": [], "usage": usage})
    return Reply(200, "".join(answers.event(json.dumps(part)) for part in parts) + answers.DONE, "text/event-stream")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _equal(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), wanted.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    session: AgentSession

    def server_bind(self) -> None:
        """Binds without the name of this machine, for which some systems ask the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of ours; nothing reads what this process prints."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Server

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_BODY:
            self.close_connection = True
            self._send(refusal(413, f"a body has {_LONGEST_BODY} bytes at most, and says so.", code="body_too_large"))
            return
        self._send(self.server.session.respond("POST", self.path, self.headers, self.rfile.read(int(length))))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._send(self.server.session.respond("GET", self.path, self.headers, b""))  # type: ignore[arg-type]

    def _send(self, reply: Reply) -> None:
        body = reply.body.encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged a request."""
