"""The Prometheus metrics of ``/metrics``; all are counted in the HTTP process, so one registry is enough."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counted: dict[str, Any] = {"namespace": "grpo_pl", "registry": self.registry}
        timed = {**counted, "buckets": _SECONDS}
        self._requests = Counter("requests", "Requests answered.", ["route", "code"], **counted)
        self._latency = Histogram("request_seconds", "From a request to its answer's last byte.", ["route"], **timed)
        self.first_token = Histogram("time_to_first_token_seconds", "Until a stream's first token.", **timed)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens, once per request.", **counted)
        self.generated_tokens = Counter("generated_tokens", "Completion tokens.", **counted)
        self._rewards = Counter("reward_statuses", "Scores given.", ["reward", "status"], **counted)
        self.running = Gauge("running_sequences", "Completions that are being drawn.", **counted)
        self.waiting = Gauge("waiting_requests", "Requests in line for a slot of the batch.", **counted)
        self.open = Gauge("open_requests", "Requests that a worker is busy with.", **counted)

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def count_scores(self, items: Sequence[Mapping[str, Any]]) -> None:
        tally = Tally((name, score["status"]) for item in items for name, score in item["rewards"].items())
        for (reward, status), count in tally.items():
            self._rewards.labels(reward, status).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)
