"""Asks an OpenAI-compatible server for the log-probabilities of given tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from time import sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from grpo_pl.openai_format.retry_after import retry_after
from grpo_pl.policy.teacher import TeacherConfig

_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


def served_logprobs(teacher: TeacherConfig, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """log p(token | those before it) of all tokens of each row but its first, at temperature 1.

    ``POST /v1/completions`` with token ids, ``echo``, ``logprobs: 0`` and ``max_tokens: 0``, which vLLM and
    ``grpo-pl serve`` answer with the prompt's own log-probabilities and without drawing anything.

    Raises:
        ValueError: the server cannot be reached, refuses, or answers something else.
    """
    size = teacher.rows_per_request
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    with ThreadPoolExecutor(teacher.concurrency) as threads:
        try:
            return [row for answer in threads.map(partial(_ask, teacher), parts) for row in answer]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # the others would only come to the same, one by one
            raise


def _ask(teacher: TeacherConfig, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    url = f"{str(teacher.url).rstrip('/')}/completions"
    body = {
        "model": teacher.served_name or teacher.path,
        "prompt": [list(row) for row in rows],
        "echo": True,
        "logprobs": 0,
        "max_tokens": 0,
        "temperature": 1.0,
    }
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {teacher.api_key}"} if teacher.api_key else {}
    problem, told = "", None
    for attempt in range(teacher.retries + 1):
        try:
            request = Request(url, json.dumps(body).encode(), headers)
            with urlopen(request, timeout=teacher.time_limit_s) as reply:
                answer = reply.read()
        except HTTPError as error:
            problem = f"answered {error.code}: {' '.join(error.read().decode(errors='replace').split())[:300]}"
            if error.code not in _TRY_AGAIN:
                break
            told = error.headers.get("Retry-After")
        except (OSError, HTTPException, ValueError) as error:
            problem, told = f"cannot be reached ({error!r})", None
        else:
            return _read(answer, rows, url)
        if attempt < teacher.retries:
            sleep(retry_after(told, 2.0**attempt))
    raise ValueError(f"the teacher at {url} {problem}. Start it, or mend model.teacher.")


def _read(answer: bytes, rows: Sequence[Sequence[int]], url: str) -> list[list[float]]:
    try:
        choices: list[dict[str, Any]] = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        found = [[float(value) for value in choice["logprobs"]["token_logprobs"][1:]] for choice in choices]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the teacher at {url} returned no log-probabilities of its prompt ({error!r}): it must know `echo` "
            "together with `logprobs`, as vLLM's server does."
        ) from error
    lengths = [len(row) - 1 for row in rows]
    if [len(row) for row in found] != lengths:
        raise ValueError(f"the teacher at {url} returned {list(map(len, found))} log-probabilities for {lengths}.")
    if not all(math.isfinite(value) for row in found for value in row):
        raise ValueError(f"the teacher at {url} returned a log-probability that is not finite.")
    return found
