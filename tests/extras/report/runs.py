"""Run folders written by hand, as a report reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_pl.files.runs import RunFolder

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{data}}\u2028"


def sample_row(step: int, prompt: int, sample: int, completion: str, value: float | None) -> dict[str, Any]:
    status = "bad_gold" if value is None else "ok" if value else "wrong"
    return {
        "step": step,
        "prompt_id": prompt,
        "sample": sample,
        "prompt": f"What is {prompt}+{prompt}?",
        "question": f"{prompt}+{prompt}",
        "answer": str(2 * prompt),
        "completion": completion,
        "tokens": 5,
        "finish_reason": "stop",
        "rewards": {"math": {"value": value, "status": status, "detail": HOSTILE}},
        "correct": None if value is None else value == 1.0,
        "reward": value,
        "advantage": None if value is None else value - 0.5,
    }


def write_samples(run: RunFolder, rows: Sequence[dict[str, Any]]) -> None:
    run.completions.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _completion(text: str, right: bool) -> dict[str, Any]:
    score = {"value": float(right), "status": "ok" if right else "wrong", "detail": ""}
    return {"completion": text, "tokens": 7, "finish_reason": "stop", "correct": right, **score}


def held_out_row(step: int, right: int, *, answers: bool = True) -> dict[str, Any]:
    """A validation of two problems with four samples; of the first ``right`` are right, of the second none."""
    value = right / 8
    estimate = {"value": value, "low": max(0.0, value - 0.1), "high": value + 0.1, "problems": 2}
    drawn = [_completion(rf"<think>{step}</think>\boxed{{{4 if i < right else 9}}}", i < right) for i in range(4)]
    listed = [
        {"group": "val", "id": 1, "question": "2+2", "answer": "4", "completions": drawn, "greedy": drawn[0]},
        {"group": "val", "id": 2, "question": HOSTILE, "answer": "", "completions": [_completion(HOSTILE, False)]},
    ]
    return {
        "step": step,
        "samples": 4,
        "metrics": {"val/pass@1": estimate},
        "pass_at": {"val": [[1, value, value / 2, min(1.0, value * 2)], [4, 0.5, 0.1, 0.9]]},
        "problems": {"val": {"1": [right, 4], "2": [0, 4]}},
        "answers": listed if answers else [],
    }


def write_run(path: Path, *, seed: int = 0) -> RunFolder:
    """A run of 30 rollouts with all files; ``seed`` also moves its numbers."""
    path.mkdir(parents=True)
    run = RunFolder(path)
    names = "step,val/pass@1,val/greedy,reward,kl,lr,time/rollout,time/update,step_time"
    status = "rewards/math/status/ok,rewards/math/status/bad_gold"
    lines = [f"{names},{status}", "0,0.1,0.2,,,,,,,,"]
    lines += [f"{s},,,{s / 40 + seed / 10},{0.01 * s},1e-06,1.0,0.5,1.5,{s},{31 - s}" for s in range(1, 31)]
    run.metrics.write_text("\n".join([*lines, "30,0.7,0.9,,,,,,,,"]) + "\n")
    rows = [
        sample_row(
            step, prompt, sample, HOSTILE if sample else f"<think>s{step}p{prompt}</think>\\boxed{{4}}", 1.0 - sample
        )
        for step in (0, 10, 20)
        for prompt in (1, 2)
        for sample in (0, 1)
    ]
    write_samples(run, [row if (row["step"], row["prompt_id"]) != (20, 1) else {**row, "reward": 0.0} for row in rows])
    run.held_out.write_text("".join(json.dumps(held_out_row(s, n)) + "\n" for s, n in ((0, 1), (30, 4))))
    run.config.write_text(f"name: </pre><script>document.title='owned'</script>\nmodel:\n  seed: {seed}\n  beta: 0.0\n")
    facts = {
        "started": "2026-11-22T06:00:00+00:00",
        "command": "grpo-pl fit --config mine.yaml",
        "model": HOSTILE,
        "parameters": 1_500_000,
        "trained_parameters": 500_000,
        "seed": seed,
        "objective": "grpo",
        "data": {"source": "Sums", "digest": "0123abcd", "held_out": {"val": 2}},
        "versions": {"grpo_pl": "0.2.0"},
        "machine": {"system": "Linux", "device": "cpu"},
        "processes": 1,
    }
    run.record.write_text(json.dumps(facts))
    return run
