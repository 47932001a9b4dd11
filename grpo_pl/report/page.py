"""Builds ``report.html``: one file without external resources, in which the texts of a run are data, not markup."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.rows import Row, read_lines
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.writing import staged
from grpo_pl.report.charts import charts
from grpo_pl.report.no_signal import no_signal

LARGEST_SAMPLES = 8_000_000
"""Most characters of prompts and completions in a report; beyond, it shows every second rollout only, or every fourth,
eighth …"""


def write_report(run: RunFolder) -> Path:
    """Writes ``report.html`` into a run's folder, atomically, and returns its path.

    Raises:
        ValueError: the folder holds no ``metrics.csv``, so it is no run folder.
    """
    if not run.metrics.is_file():
        raise ValueError(f"{run.path} holds no metrics.csv: give the folder of a run, such as runs/quickstart.")
    page = build_page(run)
    with staged(run.report) as file:
        file.write_text(page, encoding="utf-8", errors="replace")
    return run.report


def build_page(run: RunFolder) -> str:
    """The HTML text of the report."""
    name = run.path.resolve().name
    columns = read_curves(run.metrics)
    written = read_lines(run.completions, may_be_cut_short=True) if run.completions.is_file() else ()
    samples = [line.row for line in written]
    data = {
        "name": name,
        "warning": no_signal(columns),
        "tiles": _tiles(columns),
        "charts": [asdict(chart) for chart in charts(columns)],
        "samples": _rollouts(_thinned(samples)),
        "config": run.config.read_text(errors="replace") if run.config.is_file() else "",
    }
    parts = {
        "{{title}}": html.escape(f"{name} – grpo-pl"),
        "{{style}}": _asset("style.css"),
        "{{script}}": "\n".join(_asset(file) for file in ("charts.js", "samples.js", "page.js")),
        "{{data}}": _json_in_html(data),
    }
    # in one pass, so that data which looks like a placeholder is not replaced
    return re.sub(r"\{\{\w+\}\}", lambda placeholder: parts[placeholder.group()], _asset("page.html"))


def _json_in_html(data: Any) -> str:
    """``data`` as JSON for a script element; escapes whatever in a string could end that element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _tiles(columns: dict[str, Points]) -> list[dict[str, str]]:
    """The numbers at the top of the page."""
    tiles = []
    for name, label in {"val/pass@1": "pass@1, sampled", "val/greedy": "greedy", "reward": "reward"}.items():
        if name in columns:
            first, last = columns[name][0][1], columns[name][-1][1]
            tiles.append({"label": label, "value": f"{last:.3f}", "note": f"from {first:.3f}"})
    if "step_time" in columns:
        seconds = sum(value for _, value in columns["step_time"])
        rollouts = len(columns["step_time"])
        minutes = f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
        tiles.append({"label": "rollouts", "value": str(rollouts), "note": f"{minutes} without validation"})
    if "num_tokens" in columns:
        tokens = columns["num_tokens"][-1][1]
        tiles.append({"label": "tokens written", "value": _short(tokens), "note": "by the policy, in training"})
    return tiles


def _rollouts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows grouped by rollout and prompt for the browser of the page; fields that a group shares are stored once."""
    rollouts: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        group = rollouts.setdefault(row["step"], {}).setdefault(
            row["prompt_id"], {key: row[key] for key in ("prompt", "question", "answer")} | {"completions": []}
        )
        kept = ("completion", "tokens", "finish_reason", "rewards", "correct", "reward", "advantage")
        group["completions"].append({key: row[key] for key in (*kept, *(["episode"] if "episode" in row else []))})
    return [{"step": step + 1, "groups": list(groups.values())} for step, groups in sorted(rollouts.items())]


def _thinned(rows: list[Row]) -> list[Row]:
    steps = sorted({row["step"] for row in rows})
    while sum(map(_characters, rows)) > LARGEST_SAMPLES and len(steps) > 1:
        steps = steps[::2]
        kept = set(steps)
        rows = [row for row in rows if row["step"] in kept]
    return rows


def _characters(row: Row) -> int:
    episode = len(json.dumps(row["episode"])) if "episode" in row else 0
    return len(row["completion"]) + len(row["prompt"]) + episode


def _asset(name: str) -> str:
    return resources.files("grpo_pl.report").joinpath(name).read_text(encoding="utf-8")


def _short(number: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return f"{number:.0f}"
