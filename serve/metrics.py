"""The Prometheus metrics of ``/metrics``; all are counted in the front process, so one registry is enough."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SPACE = "grpo_pl"
_RATE_WINDOW_S = 10.0
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets all metrics to zero; called after the warm-up, whose requests must not count."""
        self.registry = CollectorRegistry()
        counted: dict[str, Any] = {"namespace": _SPACE, "registry": self.registry}
        timed = {**counted, "buckets": _SECONDS}
        self._requests = Counter("requests", "Requests answered.", ["route", "code"], **counted)
        self._latency = Histogram("request_seconds", "From a request to its answer's last byte.", ["route"], **timed)
        self.first_token = Histogram("time_to_first_token_seconds", "Until a stream's first token.", **timed)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens, once per request.", **counted)
        self._tokens = Counter("generated_tokens", "Completion tokens.", **counted)
        self._rewards = Counter("reward_statuses", "Scores given.", ["reward", "status"], **counted)
        self.running = Gauge("running_sequences", "Completions that have a slot of the batch.", **counted)
        self.waiting = Gauge("waiting_requests", "Requests in line for a slot of the batch.", **counted)
        self.open = Gauge("open_buffers", "Requests that a worker is busy with or has answers for.", **counted)
        self._rate = Gauge("tokens_per_second", f"Completion tokens over the last {_RATE_WINDOW_S:g} s.", **counted)
        self._rate.set_function(self._tokens_per_second)
        self._recent: deque[tuple[float, int]] = deque()

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def count_tokens(self, tokens: int) -> None:
        self._tokens.inc(tokens)
        self._recent.append((time.monotonic(), tokens))
        self._forget_old()

    def count_scores(self, items: Sequence[Mapping[str, Any]]) -> None:
        tally = Tally((name, score["status"]) for item in items for name, score in item["rewards"].items())
        for (reward, status), count in tally.items():
            self._rewards.labels(reward, status).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _forget_old(self) -> None:
        horizon = time.monotonic() - _RATE_WINDOW_S
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()

    def _tokens_per_second(self) -> float:
        self._forget_old()
        return sum(tokens for _, tokens in self._recent) / _RATE_WINDOW_S
