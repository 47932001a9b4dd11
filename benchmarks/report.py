"""Measures the report of a run of 10,000 rollouts: its size, and how long Chromium takes until it is drawn.

    python benchmarks/report.py [--rollouts 10000] [--repeats 5] [--output FILE]

The run is made up, with every file that a real one leaves: metrics of 40 columns, completions up to the limit of
`completions.jsonl`, 201 validations of 500 problems. Needs chromium and chromedriver on the path.
"""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from common import free_port, parser_of, publish, surroundings

from grpo_pl.extras.report.page import write_report
from grpo_pl.files.rows import json_line
from grpo_pl.files.runs import RunFolder

STAGES = ("rollout", "reward", "logprobs", "backward", "optimizer", "update")
STATUSES = ("ok", "wrong", "no_answer", "timeout", "bad_gold")
DRAWN = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => {
  const entry = performance.getEntriesByType('navigation')[0];
  done({ms: performance.now(), parsed: entry.domContentLoadedEventEnd, loaded: entry.loadEventEnd,
    charts: document.querySelectorAll('.chart svg *').length})
}));
"""
"""Asked of the page once it is loaded: milliseconds since the navigation began, when it was laid out and painted."""


def made_up_run(path: Path, *, rollouts: int, seed: int = 0, megabytes: float = 32.0) -> RunFolder:
    """A run folder that looks like one of a policy which learns."""
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(path)
    skill = [1 / (1 + math.exp(-6 * (step / rollouts - 0.4 - 0.05 * seed))) for step in range(rollouts + 1)]
    every = max(1, rollouts // 200)
    validations = [*range(0, rollouts + 1, every)]
    hard = [rng.random() for _ in range(500)]
    with run.held_out.open("w") as file:
        for step in validations:
            counts = {i: [sum(rng.random() < _rate(skill[step], h) for _ in range(8)), 8] for i, h in enumerate(hard)}
            file.write(json_line(_validation(step, counts, ends=step in (validations[0], validations[-1]), rng=rng)))
    _metrics(run, rollouts, skill, validations, rng)
    _completions(run, rollouts, skill, megabytes, rng)
    run.config.write_text(f"seed_everything: {seed}\nmodel:\n  optimization:\n    lr: {1e-6 * (1 + seed)}\n")
    facts = {
        "started": "2026-11-22T06:00:00+00:00",
        "command": f"grpo-pl fit --config configs/gsm8k.yaml --seed_everything={seed}",
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "parameters": 494032768,
        "trained_parameters": 494032768,
        "seed": seed,
        "objective": ("grpo", "dr_grpo")[seed % 2],
        "rollouts": rollouts,
        "data": {"source": "TablePrompts", "digest": "5a0c1f2be7d3940f", "held_out": {"val": 500}},
        "versions": {"python": "3.11.7", "grpo_pl": "0.2.0", "torch": "2.13.0", "lightning": "2.6.6"},
        "machine": {"system": "Linux", "device": "cuda:0"},
        "processes": 1,
    }
    run.record.write_text(json.dumps(facts))
    return run


def _rate(skill: float, hardness: float) -> float:
    return 1 / (1 + math.exp(-8 * (skill - hardness)))


def _estimate(value: float, problems: int = 500) -> dict[str, Any]:
    half = 1.96 * math.sqrt(max(value * (1 - value), 1e-4) / problems)
    return {"value": value, "low": max(0.0, value - half), "high": min(1.0, value + half), "problems": problems}


def _validation(step: int, counts: dict[int, list[int]], *, ends: bool, rng: random.Random) -> dict[str, Any]:
    right = [c for c, _ in counts.values()]
    curve = []
    for k in (1, 2, 4, 8):
        value = statistics.fmean(1 - math.comb(8 - c, k) / math.comb(8, k) for c in right)
        found = _estimate(value)
        curve.append([k, value, found["low"], found["high"]])
    greedy = statistics.fmean(c > 4 for c in right)
    answers = [
        {
            "group": "val",
            "id": i,
            "question": f"A baker has {i + 3} trays with 12 rolls each and sells {i} rolls. How many are left?",
            "answer": str(12 * (i + 3) - i),
            "completions": [_answer(12 * (i + 3) - i, j < counts[i][0], rng) for j in range(8)],
            "greedy": _answer(12 * (i + 3) - i, counts[i][0] > 4, rng),
        }
        for i in range(12 if ends else 0)
    ]
    return {
        "step": step,
        "samples": 8,
        "temperature": 1.0,
        "metrics": {
            "val/pass@1": _estimate(curve[0][1]),
            "val/pass@8": _estimate(curve[3][1]),
            "val/greedy": _estimate(greedy),
        },
        "pass_at": {"val": curve},
        "problems": {"val": counts},
        "unjudged": {"val": 0},
        "answers": answers,
    }


def _text(gold: int, right: bool, rng: random.Random) -> str:
    said = gold if right else gold + rng.choice([-1, 1, 2, 10, 10])
    thought = "First the rolls on all trays, then those that are sold. " * rng.randint(2, 9)
    return f"<think>{thought}</think>\nThe answer is \\boxed{{{said}}}."


def _answer(gold: int, right: bool, rng: random.Random) -> dict[str, Any]:
    score = {"value": float(right), "status": "ok" if right else "wrong", "detail": str(gold)}
    text = _text(gold, right, rng)
    return {"completion": text, "tokens": len(text) // 4, "finish_reason": "stop", "correct": right, **score}


def _metrics(run: RunFolder, rollouts: int, skill: list[float], validations: list[int], rng: random.Random) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(rollouts + 1):
        s = skill[step]
        if step:
            noise = rng.gauss(0, 0.05)
            right = min(1.0, max(0.0, s + noise))
            none = 8.0 if rollouts // 3 < step < rollouts // 3 + rollouts // 20 else 0.0
            counts = dict(
                zip(STATUSES, (64 * right, 64 * (1 - right) * 0.7, 64 * (1 - right) * 0.3, 1.0, none), strict=True)
            )
            rows.append(
                {
                    "step": step,
                    "reward": right + 0.1,
                    "rewards/math/mean": right,
                    "rewards/format/mean": min(1.0, right + 0.3),
                    "completions/correct": right,
                    "completions/mean_length": 120 + 80 * s + rng.gauss(0, 6),
                    "completions/mean_length_correct": 110 + 60 * s + rng.gauss(0, 6),
                    "completions/mean_length_wrong": 140 + 160 * s + rng.gauss(0, 12),
                    "completions/clipped_ratio": 0.1 * (1 - s),
                    "completions/reflection_rate": 0.3 * s,
                    "frac_reward_zero_std": abs(2 * s - 1) ** 3,
                    "kl": 0.02 * s + abs(rng.gauss(0, 0.001)),
                    "entropy": 1.2 - 0.9 * s + rng.gauss(0, 0.02),
                    "clip_ratio/low_mean": abs(rng.gauss(0, 0.002)),
                    "clip_ratio/high_mean": abs(rng.gauss(0, 0.003)),
                    "grad_norm": 0.3 + abs(rng.gauss(0, 0.1)),
                    "lr": 1e-6 * (1 - step / (rollouts + 1)),
                    "num_tokens": step * 64 * 150,
                    "step_time": 4.0,
                    **{
                        f"time/{stage}": (2.0, 0.3, 0.4, 0.8, 0.1, 0.3)[i] + abs(rng.gauss(0, 0.1))
                        for i, stage in enumerate(STAGES)
                    },
                    **{f"rewards/math/status/{status}": count for status, count in counts.items() if count},
                    **{f"rewards/format/status/{status}": counts[status] for status in STATUSES[:2]},
                }
            )
        if step in validations:
            value = statistics.fmean(_rate(s, h / 20) for h in range(20))
            rows.append(
                {
                    "step": step,
                    "val/pass@1": value,
                    "val/pass@8": min(1.0, value + 0.15 * (1 - value)),
                    "val/greedy": value,
                }
            )
    names = list(dict.fromkeys(name for row in rows for name in row))
    with run.metrics.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _completions(run: RunFolder, rollouts: int, skill: list[float], megabytes: float, rng: random.Random) -> None:
    """Every so many rollouts, as the log keeps them within its limit."""
    per_rollout = 4 * 8 * 700
    stride = 1
    while rollouts / stride * per_rollout > megabytes * 1e6:
        stride *= 2
    with run.completions.open("w") as file:
        for step in range(0, rollouts, stride):
            for prompt in range(4):
                a, b = rng.randint(10, 99), rng.randint(10, 99)
                verdicts = [rng.random() < _rate(skill[step], rng.random()) for _ in range(8)]
                mean = sum(verdicts) / 8
                for sample, right in enumerate(verdicts):
                    text = _text(a + b, right, rng)
                    score = {"value": float(right), "status": "ok" if right else "wrong", "detail": ""}
                    form = {"value": 1.0, "status": "ok", "detail": ""}
                    row = {
                        "step": step,
                        "prompt_id": 4 * step + prompt,
                        "sample": sample,
                        "prompt": f"<|user|>\nWhat is {a}+{b}?<|assistant|>\n<think>",
                        "question": f"What is {a}+{b}?",
                        "answer": str(a + b),
                        "completion": text,
                        "tokens": len(text) // 4,
                        "finish_reason": "stop",
                        "rewards": {"math": score, "format": form},
                        "correct": right,
                        "reward": right + 0.1,
                        "advantage": right - mean,
                    }
                    file.write(json_line(row))


class Chromium:
    """A fresh Chromium for every measurement, spoken to in plain WebDriver."""

    def __enter__(self) -> Chromium:
        port = free_port()
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        while True:
            try:
                self._send("/status", None)
                break
            except OSError:
                time.sleep(0.1)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000"]
        options = {"binary": shutil.which("chromium"), "args": flags}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        self._session = f"/session/{self._send('/session', {'capabilities': capabilities})['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        request = urllib.request.Request(self._base + self._session, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        self._driver.terminate()
        self._driver.wait()

    def open(self, page: Path) -> dict[str, float]:
        self._send(f"{self._session}/url", {"url": page.resolve().as_uri()})
        return dict(self._send(f"{self._session}/execute/async", {"script": DRAWN, "args": []}))

    def _send(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._base + path, data), timeout=120) as answer:
            return json.load(answer)["value"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = made_up_run(Path(folder) / "long", rollouts=options.rollouts)
        began = time.perf_counter()
        page = write_report(run)
        written = time.perf_counter() - began
        opened = []
        for _ in range(options.repeats):
            with Chromium() as chromium:
                opened.append(chromium.open(page))
        found = {
            "rollouts": options.rollouts,
            "completions_mb": round(run.completions.stat().st_size / 1e6, 1),
            "page_mb": round(page.stat().st_size / 1e6, 2),
            "write_seconds": round(written, 2),
            "open_ms": sorted(round(each["ms"]) for each in opened),
            "shapes": opened[0]["charts"],
        }
    publish({"benchmark": "report", **surroundings("cpu"), "browser": browser(), **found}, options.output)


def browser() -> str:
    """Name and version of the browser."""
    told = subprocess.run(["chromium", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


if __name__ == "__main__":
    main()
