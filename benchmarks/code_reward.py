"""Measures how many trivial programs CodeReward runs in a second: calls of a function, and inputs that are read.

All programs differ, since equal ones with equal tests are run once.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from common import parser_of, publish, surroundings

from grpo_pl.rewards import CodeReward

CALL = json.dumps({"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]})
READ = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
PROGRAMS = {
    "calls": (CALL, "def add(a, b): return a + b  # {}"),
    "inputs": (READ, "print(sum(map(int, input().split())))  # {}"),
}


def per_second(reward: CodeReward, tests: str, program: str, count: int, repeats: int) -> list[float]:
    figures = []
    for repeat in range(repeats):
        texts = [f"```python\n{program.format(f'{repeat}-{i}')}\n```" for i in range(count)]
        started = time.perf_counter()
        scores = reward(texts, [tests] * count, {})
        figures.append(count / (time.perf_counter() - started))
        assert all(score.value == 1.0 for score in scores)
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    reward = CodeReward(isolation="available", workers=options.workers)
    started = time.perf_counter()
    reward.start()
    record: dict[str, Any] = {
        "benchmark": "code_reward",
        **surroundings("cpu"),
        "level": reward.level,
        "workers": options.workers,
        "start_s": round(time.perf_counter() - started, 2),
    }
    for name, (tests, program) in PROGRAMS.items():
        figures = per_second(reward, tests, program, options.programs, options.repeats)
        record[f"{name}_per_s"] = {"median": round(statistics.median(figures)), "all": list(map(round, figures))}
    reward.close()
    publish(record, options.output)


if __name__ == "__main__":
    main()
