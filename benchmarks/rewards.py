"""Measures the speed of MathReward: start of the pool, GRPO-shaped batches, all-distinct pairs, and batches with bombs
(answers that would hang); and the share of rewards in a quickstart step.

The in-process figure is math-verify
alone on the same pairs, without any limits; the difference is the cost of the sandbox.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import parser_of, publish, surroundings
from runs import CONFIGS, fit, numbers

from grpo_pl.rewards import FunctionReward, MathReward
from grpo_pl.rewards.batch import score_completions

PROMPTS, GROUP = 64, 16
SOFT_LIMIT_S = 1.0
BOMBS = ["9^{9^{9^9}}", r"\binom{10^9}{5\cdot10^8}", "9^{9^{9^9}}+1", "(x+y+2)^{2000}"]
FILLER = "We expand the product, collect like terms, and check the sign of each of them before going on. "


def golds(rng: random.Random, count: int) -> list[str]:
    """Gold answers of the kinds that competition data sets hold; a third of them plain integers."""
    a, b, c = (rng.sample(range(2, 2 + 3 * count), count) for _ in range(3))
    kinds = [
        lambda i: str(a[i]),
        lambda i: f"\\frac{{{a[i]}}}{{{b[i] * a[i] + 1}}}",
        lambda i: f"{a[i]}\\sqrt{{{4 * c[i] + 3}}}",
        lambda i: f"{a[i]}x^2+{b[i]}x-{c[i]}",
        lambda i: f"({a[i]},{b[i]})",
        lambda i: str(b[i]),
        lambda i: f"\\frac{{{a[i]}\\pi}}{{{2 * b[i] + 1}}}",
        lambda i: f"{{{a[i]}, {-b[i]}, {c[i]}}}".replace("{", "\\{").replace("}", "\\}"),
        lambda i: f"{a[i]}.{b[i]}",
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def answers(rng: random.Random, gold: str, count: int) -> list[str]:
    """The answers of a group: most right and equal, some right in another form, the rest one of three mistakes."""
    other = gold.replace("\\frac", "\\dfrac").replace("x^2", "x\\cdot x").replace(",", ", ")
    slips = [gold.replace(d, str((int(d) + k) % 10)) for k in range(1, 4) for d in gold if d.isdigit()] or ["0"]
    wrong = [rng.choice(slips) for _ in range(3)]
    return rng.choices([gold, other, *wrong], [0.45, 0.15, 0.2, 0.15, 0.05], k=count)


def completion(answer: str) -> str:
    """A completion of about 800 characters that ends in the boxed answer."""
    return f"<think>{FILLER * 8}</think><answer>Thus \\boxed{{{answer}}}.</answer>"


def batch(seed: int, *, prompts: int, group: int, bomb_share: float = 0.0) -> tuple[list[str], list[str]]:
    """(completions, golds) with ``prompts`` × ``group`` rows; ``bomb_share`` of them are bombs, kind by kind."""
    rng = random.Random(seed)
    pairs = [(answer, gold) for gold in golds(rng, prompts) for answer in answers(rng, gold, group)]
    for i, row in enumerate(rng.sample(range(len(pairs)), round(bomb_share * len(pairs)))):
        pairs[row] = (f"{BOMBS[(seed + i) % len(BOMBS)]}+{row}", pairs[row][1])
    return [completion(answer) for answer, _ in pairs], [gold for _, gold in pairs]


def cpu_seconds(reward: MathReward) -> float:
    """CPU seconds that this process and its live workers have used, which do not depend on the load of the machine."""
    ticks = 0
    for pid in reward.pool.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


def pairs_per_second(reward: MathReward, texts: list[str], rows: list[str]) -> tuple[float, dict[str, int]]:
    started = time.perf_counter()
    scores = reward(texts, rows, {})
    seconds = time.perf_counter() - started
    counts: dict[str, int] = {}
    for score in scores:
        counts[score.status] = counts.get(score.status, 0) + 1
    return len(texts) / seconds, counts


def in_process_pairs_per_second(texts: list[str], rows: list[str]) -> float:
    """Pairs per second of ``math_verify.parse`` and ``verify``, used as in their documentation, one after another."""
    from math_verify import parse, verify

    started = time.perf_counter()
    for text, gold in zip(texts, rows, strict=True):
        verify(parse(f"\\boxed{{{gold}}}"), parse(text))
    return len(texts) / (time.perf_counter() - started)


def measure(repeats: int) -> dict[str, Any]:
    """The figures of one pool; ``SYMPY_GROUND_TYPES`` in the environment decides whether it computes with gmpy2."""
    starts, grpo, per_cpu_second, distinct, bombs = [], [], [], [], []
    counts: dict[str, int] = {}
    reward = MathReward(soft_limit_s=SOFT_LIMIT_S, workers=2)
    for _ in range(repeats):
        reward.close()
        started = time.perf_counter()
        reward.pool.start()
        starts.append(time.perf_counter() - started)
    for seed in range(repeats):
        used = cpu_seconds(reward)
        grpo.append(pairs_per_second(reward, *batch(seed, prompts=PROMPTS, group=GROUP))[0])
        per_cpu_second.append(PROMPTS * GROUP / (cpu_seconds(reward) - used))
        distinct.append(pairs_per_second(reward, *batch(100 + seed, prompts=300, group=1))[0])
        speed, counts = pairs_per_second(reward, *batch(200 + seed, prompts=32, group=GROUP, bomb_share=0.02))
        bombs.append(speed)
    kills = reward.pool.kills
    reward.close()
    return {
        "pool_start_s": round(statistics.median(starts), 3),
        "grpo_pairs_per_s": round(statistics.median(grpo)),
        "grpo_pairs_per_cpu_s": round(statistics.median(per_cpu_second)),
        "distinct_pairs_per_s": round(statistics.median(distinct)),
        "bombs_2_percent_pairs_per_s": round(statistics.median(bombs)),
        "bombs_last_batch": counts,
        "workers_killed": kills,
    }


def distinct_pairs_by_workers(repeats: int) -> dict[str, float]:
    """Medians of pairs per second where all pairs differ: math-verify alone, and pools of one and of two workers. Each
    batch is judged by all three in an order that changes, so that the load of the machine is the same for them; pairs
    per CPU second of this process and one worker hardly depend on it."""
    pools = {f"workers_{count}": MathReward(soft_limit_s=SOFT_LIMIT_S, workers=count) for count in (1, 2)}
    speeds: dict[str, list[float]] = {"math_verify": [], **{name: [] for name in pools}}
    per_cpu_second: list[float] = []
    for reward in pools.values():
        reward.start()
    for seed in range(repeats):
        texts, rows = batch(300 + seed, prompts=300, group=1)
        for name in random.Random(seed).sample(sorted(speeds), len(speeds)):
            if name in pools:
                used = cpu_seconds(pools[name])
                speeds[name].append(pairs_per_second(pools[name], texts, rows)[0])
                if name == "workers_1":
                    per_cpu_second.append(len(texts) / (cpu_seconds(pools[name]) - used))
            else:
                speeds[name].append(in_process_pairs_per_second(texts, rows))
    for reward in pools.values():
        reward.close()
    speeds["workers_1_per_cpu_second"] = per_cpu_second
    return {name: round(statistics.median(found), 1) for name, found in speeds.items()}


async def _nap(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.5)
    return [1.0] * len(completions)


def three_naps_s() -> float:
    """Seconds for three asynchronous reward functions that each wait for half a second."""
    rewards = [FunctionReward(function=_nap, name=f"nap{i}") for i in range(3)]
    started = time.perf_counter()
    score_completions(rewards, completions=["x"], answers=[""], columns={})
    return round(time.perf_counter() - started, 3)


def share_of_quickstart() -> dict[str, float]:
    """Seconds of a quickstart step, and the time of rewards and of the watch (not part of the step) relative to it."""
    with tempfile.TemporaryDirectory() as folder:
        done = fit(CONFIGS / "quickstart.yaml", Path(folder), "--trainer.limit_val_batches=0")
        rows = done.rows("step_time")
    total = {key: sum(numbers(rows, key, 9)) for key in ("step_time", "time/reward", "time/watch")}
    return {
        "step_s": round(total["step_time"] / len(rows), 3),
        "reward_share": round(total["time/reward"] / total["step_time"], 4),
        "watch_share": round(total["time/watch"] / total["step_time"], 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="batches per figure; the median counts")
    parser.add_argument(
        "--distinct", action="store_true", help="only math-verify, one and two workers on pairs that differ"
    )
    options = parser.parse_args()
    machine = {**surroundings("cpu"), "math_verify": version("math-verify"), "sympy": version("sympy")}
    if options.distinct:
        speeds = distinct_pairs_by_workers(options.repeats)
        publish({"benchmark": "rewards-distinct", "distinct_pairs_per_s": speeds, **machine}, options.output)
        return
    figures: dict[str, dict[str, Any]] = {}
    quickstart = share_of_quickstart()
    if importlib.util.find_spec("gmpy2") is not None:
        figures["gmpy2"] = measure(options.repeats)
        os.environ.update(SYMPY_GROUND_TYPES="python", MPMATH_NOGMPY="1")
    figures["python"] = measure(options.repeats)
    peer = [
        in_process_pairs_per_second(*(side[:200] for side in batch(seed, prompts=PROMPTS, group=GROUP)))
        for seed in range(options.repeats)
    ]
    result = {
        "benchmark": "rewards",
        "pools_by_ground_types": figures,
        "math_verify_in_process_pairs_per_s": round(statistics.median(peer)),
        "three_asynchronous_rewards_of_half_a_second_s": three_naps_s(),
        "quickstart": quickstart,
        "targets": {
            "pool_start_s": 1.0,
            "grpo_pairs_per_s": 1500,
            "bombs_2_percent_pairs_per_s": 80,
            "three_asynchronous_rewards_of_half_a_second_s": 0.7,
            "quickstart_reward_share": 0.05,
            "quickstart_watch_share": 0.01,
        },
        "soft_limit_s": SOFT_LIMIT_S,
        "hard_limit_s": MathReward.hard_limit_s,
        "workers": 2,
        **machine,
    }
    publish(result, options.output)


if __name__ == "__main__":
    main()
