"""Milliseconds that a call of an agent takes beside the draw, over plain HTTP: sessions answered at once.

``python benchmarks/agent_calls.py`` prints one row for one session and one for 32 at a time.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from pathlib import Path
from typing import Any

from common import publish, surroundings

from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.pool import EnvironmentPool, PoolLimits

CALLS, ROUNDS = 50, 3


def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """The agent: a conversation that grows by two messages a call."""
    address = urllib.parse.urlparse(base_url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    messages = [{"role": "user", "content": task["question"]}]
    for number in range(CALLS):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        answer = json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(number)}]
    return 1.0


def milliseconds(pool: EnvironmentPool, sessions: int) -> float:
    """Of a call, over all calls of so many sessions at a time."""
    for number in range(sessions):
        pool.reset(number, seed=0, row={"question": "?"})
    last, start, calls = pool.collect_all(), time.perf_counter(), 0
    while live := [number for number, transition in last.items() if not transition.done]:
        for number in live:
            pool.step(number, "turn", drawn={"finish_reason": "stop"})
            calls += 1
        last |= pool.collect_all()
    assert calls == CALLS * sessions and {each.status for each in last.values()} == {"ok"}, last
    return round(1000 * (time.perf_counter() - start) / calls, 2)


def main() -> None:
    agent = AgentEnvironment(agent=f"{Path(__file__).resolve()}:run", rewarded_by="agent")
    record: dict[str, Any] = {"benchmark": "agent_calls", **surroundings("cpu"), "milliseconds": {}}
    with EnvironmentPool(agent, PoolLimits(step_timeout_s=20.0)) as pool:
        for sessions in (1, 32):
            record["milliseconds"][sessions] = [milliseconds(pool, sessions) for _ in range(ROUNDS)]
    publish(record, None)


if __name__ == "__main__":
    main()
