"""``EngineClient``: an engine's server as a run sees it: what it asks by HTTP, and what the answers mean."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx2

from grpo_pl.rollout.engine import EngineDied, PolicyDiverged, ProgressFn, RolloutInterrupted
from grpo_pl.rollout.remote import wire
from grpo_pl.types import GenerateRequest, Rollout, StopStrings

CONNECT_S = 5.0
"""Most seconds for a connection to be made."""
SOON_S = 2.0
"""Most seconds for a farewell."""


class InUse(ValueError):
    """Another run has the engine."""

    ends_in_s = 0.0
    """When its lease ends, if it is not heard from."""
    url = ""
    """Whose."""


class Unreachable(EngineDied):
    """Nobody answers, or not as an engine's server does; it may come back."""


class GaveUp(EngineDied):
    """Nobody answered for as long as was to be waited."""

    final = True


class EngineClient:
    """One server.

    Args:
        url: where it is.
        silence_s: for so long it may say nothing; then it counts as gone.
    """

    def __init__(self, url: str, *, token: str | None, ca_file: str | None, silence_s: float) -> None:
        self.url = url.rstrip("/")
        self._sent: set[str] = set()  # tokenizers that it has, by their names
        self._written: tuple[Any, str, dict[str, Any]] | None = None  # a tokenizer, its name, and what is sent of it
        self._http = httpx2.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | ({} if token is None else {"Authorization": f"Bearer {token}"}),
            timeout=httpx2.Timeout(silence_s, connect=min(CONNECT_S, silence_s), pool=None),
            verify=url.startswith("https:") and (ca_file is None or ssl.create_default_context(cafile=ca_file)),
            trust_env=False,  # a proxy of the environment is for the world outside
        )

    def about(self) -> dict[str, Any]:
        """What it runs."""
        about = self._ask("GET", "/v1/engine")
        return self._checked(about, "max_tokens", "dtype", "lease_s", "reads_files")

    def open(
        self, session: str, policy: dict[str, Any], mark: str | None, who: str, should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        """See `Seat.open`; ``should_stop`` as in `generate`."""
        body = json.dumps({"policy": policy, "mark": mark, "who": who}).encode()
        state, _ = self._follow("PUT", f"/v1/sessions/{session}", body, should_stop=should_stop)
        self._sent = set(self._checked(state, "mark", "push", "busy", "tokenizers")["tokenizers"])
        return state

    def renew(self, session: str, who: str, timeout_s: float) -> None:
        self._ask("POST", f"/v1/sessions/{session}", params={"who": who}, timeout=timeout_s)

    def leave(self, session: str) -> None:
        """Says so if the server can be reached; else the lease ends by itself."""
        with suppress(EngineDied, ValueError):
            self._ask("DELETE", f"/v1/sessions/{session}", timeout=SOON_S)

    def push(self, session: str, mark: str, frames: Iterator[bytes]) -> None:
        """Sends weights, as `wire.framed` buckets with an empty one at the end."""
        self._follow("PUT", _weights(session, mark), frames, kind="application/octet-stream")

    def push_files(self, session: str, mark: str, names: Sequence[str]) -> None:
        """Has it read weights from files of the folder that it was started with."""
        self._follow("PUT", _weights(session, mark), json.dumps({"files": list(names)}).encode())

    def generate(
        self,
        session: str,
        mark: str,
        request: GenerateRequest,
        *,
        progress: ProgressFn,
        should_stop: Callable[[], bool],
    ) -> Rollout:
        """Draws; ``should_stop`` is asked a few times a second, and closes the connection."""
        stops, named = request.stops, None
        if stops is not None:
            key = self._send_tokenizer(session, stops)
            named = wire.Stops(texts=tuple(stops.texts), prefix=stops.prefix, tokenizer=key)
        asked = wire.Request.of(request, mark=mark, stops=named)
        head, data = self._follow(
            "POST", f"/v1/sessions/{session}/generate", asked.encoded(), progress=progress, should_stop=should_stop
        )
        with self._reading():
            rows = sum(map(len, asked.keys))
            sampling = asked.sampling
            top = sampling.top_logprobs > 0 and sampling.temperature > 0
            rollout, drawn_from = wire.rollout_of(head, data, rows=rows, top=top)
            if drawn_from != mark:
                raise wire.Malformed(f"it drew from the weights {drawn_from!r}, not {mark!r}.")
        return rollout

    def close(self) -> None:
        self._http.close()

    def _send_tokenizer(self, session: str, stops: StopStrings) -> str:
        if self._written is None or self._written[0] is not stops.tokenizer:
            self._written = (stops.tokenizer, *self._serialised(stops))
        _, key, body = self._written
        if key not in self._sent:
            self._ask("PUT", f"/v1/sessions/{session}/tokenizers/{key}", json=body)
            self._sent.add(key)
        return key

    def _serialised(self, stops: StopStrings) -> tuple[str, dict[str, Any]]:
        backend = getattr(stops.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                "stop strings on an engine's server need a tokenizer of the tokenizers library, and this policy's is "
                f"a {type(stops.tokenizer).__name__}: take sampling.stop_token_ids, or an engine on this host."
            )
        text = backend.to_str()
        clean_up = bool(getattr(stops.tokenizer, "clean_up_tokenization_spaces", False))
        return wire.tokenizer_name(text, clean_up), {"tokenizer": text, "clean_up": clean_up}

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._reading():
            answer = self._http.request(method, path, **options)
            self._check(answer)
            value = answer.json()
            if not isinstance(value, dict):
                raise wire.Malformed("the answer is that of another server.")
            return value

    def _checked(self, value: dict[str, Any], *names: str) -> dict[str, Any]:
        if not set(names) <= value.keys():
            raise EngineDied(f"{self._name}: the answer is that of another server.")
        return value

    def _follow(
        self,
        method: str,
        path: str,
        content: bytes | Iterator[bytes],
        *,
        kind: str = "application/json",
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """The last event of a streamed answer."""
        headers = {"Content-Type": kind}
        with self._reading(), self._http.stream(method, path, content=content, headers=headers) as answer:
            if answer.is_error:
                answer.read()
            self._check(answer)
            for head, data in wire.events(answer.iter_raw()):
                if head["kind"] == "done":
                    return head, data
                if head["kind"] == "error":
                    raise self._error(str(head.get("error")), str(head.get("message")))
                if progress is not None:
                    progress(int(head.get("tokens", 0)), int(head.get("finished", 0)))
                if should_stop is not None and should_stop():
                    raise RolloutInterrupted
        raise EngineDied(f"{self._name}: the answer has no end.")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"{self._name} cannot be reached: {what}.") from error
        except (
            wire.Malformed,
            json.JSONDecodeError,
            UnicodeDecodeError,
            RecursionError,
            httpx2.DecodingError,
        ) as error:
            raise EngineDied(f"{self._name}: {error}") from error

    def _check(self, answer: httpx2.Response) -> None:
        """Raises what a status stands for."""
        if answer.is_success:
            return
        try:
            error = answer.json()["error"]
            code, message = str(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError, RecursionError):  # a proxy's
            code, message, error = "", " ".join(answer.text.split())[:200], {}
        line = f"{self._name} answers {answer.status_code}: {message}"
        if code == "in_use":
            refused = InUse(line)
            refused.ends_in_s, refused.url = float(error.get("ends_in_s", 0.0)), self.url
            raise refused
        if code == "tokenizer":
            self._sent.clear()
        if answer.status_code in (502, 503, 504):
            raise Unreachable(line)
        if answer.status_code >= 500 or code in ("lost", "tokenizer", "broke_off", "timeout"):
            raise EngineDied(line)
        raise ValueError(line)

    def _error(self, kind: str, message: str) -> Exception:
        if kind == "diverged":
            return PolicyDiverged(message)
        if kind == "stopped":
            return EngineDied(f"{self._name} was told to stop.")
        kinds: dict[str, type[Exception]] = {"died": EngineDied, "lost": EngineDied, "refused": ValueError}
        return kinds.get(kind, RuntimeError)(f"{self._name}: {message}")

    @property
    def _name(self) -> str:
        return f"the engine at {self.url}"


def _weights(session: str, mark: str) -> str:
    return f"/v1/sessions/{session}/weights/{mark}"
