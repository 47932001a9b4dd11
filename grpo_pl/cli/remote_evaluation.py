"""A small client of ``/v1/evaluate``; it sends a few problems per request, so that progress can be shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from grpo_pl.openai_format.retry_after import retry_after

_PER_REQUEST = 8  # problems
_AT_ONCE = 3  # requests
_PATIENCE_S = 600.0  # for a server that is busy
_PAUSE_S = 0.1  # at least, or one that says 0 would be asked thousands of times


class ServerError(OSError):
    """The server refused a request, or cannot be reached."""


def evaluate_remotely(
    server: str, items: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, api_key: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Evaluates ``items`` on a server; yields (index, result) as answers arrive, in any order of requests.

    Raises:
        ServerError: see ``post``.
    """
    url = server.rstrip("/").removesuffix("/v1") + "/v1/evaluate"
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        running = {
            threads.submit(post, url, {**options, "items": list(items[i : i + _PER_REQUEST])}, api_key=api_key): i
            for i in range(0, len(items), _PER_REQUEST)
        }
        try:
            for answer in as_completed(running):
                yield from enumerate(answer.result()["items"], start=running[answer])
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def post(url: str, body: Mapping[str, Any], *, api_key: str | None) -> dict[str, Any]:
    """Posts JSON and returns the JSON answer; while the server is full (429) it waits and tries again.

    Raises:
        ServerError: the server cannot be reached, is full for too long, or refuses; with the server's own message.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    content = json.dumps(body).encode()  # ASCII only, so that a column may hold any text, lone surrogates included
    give_up = monotonic() + _PATIENCE_S
    while True:
        try:
            with urlopen(Request(url, content, headers), timeout=_PATIENCE_S) as answer:
                result: dict[str, Any] = json.load(answer)
                return result
        except HTTPError as refused:
            if refused.code != 429 or monotonic() > give_up:
                raise ServerError(f"{url} answered {refused.code}: {_message(refused.read())}") from None
            pause = retry_after(refused.headers.get("Retry-After"), 1.0)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"no server at {url}: {error}") from None
        sleep(max(_PAUSE_S, pause))


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not an answer of this server: a proxy's, for example
        return answer.decode(errors="replace")[:200]
