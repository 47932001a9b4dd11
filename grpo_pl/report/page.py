"""Builds ``report.html``: one file without external resources, in which the texts of a run are data, not markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.rows import Row, line_name, read_lines, read_object
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.writing import staged
from grpo_pl.report.charts import charts, held_out_charts
from grpo_pl.report.look import asset, json_in_html, whole_page
from grpo_pl.report.no_signal import no_signal
from grpo_pl.report.problems import before_and_after, length_chart, problem_charts

LARGEST_SAMPLES = 8_000_000
"""Most bytes of samples in a report; beyond, it shows every second rollout only, or every fourth, eighth …"""

IN_COMPLETIONS = (
    *("step", "prompt_id", "sample", "prompt", "question", "answer", "completion", "tokens", "finish_reason"),
    *("rewards", "correct", "reward", "advantage"),
)
IN_HELD_OUT = ("step", "metrics", "problems")
IN_RECORD = (
    *("model", "parameters", "trained_parameters", "objective", "seed", "data", "command", "started", "versions"),
    *("machine", "processes"),
)
"""Fields of a run's files without which there is no report."""


def write_report(run: RunFolder) -> Path:
    """Writes ``report.html`` into a run's folder, atomically, and returns its path.

    Raises:
        ValueError: the folder holds no ``metrics.csv``, so it is no run folder.
    """
    require_run(run)
    page = build_page(run)
    with staged(run.report) as file:
        file.write_text(page, encoding="utf-8", errors="replace")
    return run.report


def require_run(run: RunFolder) -> None:
    """Refuses a folder without ``metrics.csv``."""
    if not run.metrics.is_file():
        raise ValueError(f"{run.path} holds no metrics.csv: give the folder of a run, such as runs/quickstart.")


def build_page(run: RunFolder) -> str:
    """The HTML text of the report."""
    columns, validations = read_curves(run.metrics), read_if_there(run.held_out, IN_HELD_OUT)
    samples = read_if_there(run.completions, IN_COMPLETIONS)
    training = [asdict(chart) for chart in charts(columns)]
    lengths = length_chart(samples)
    data = {
        "name": run_name(run),
        "runs": 1,
        "warning": no_signal(columns),
        "tiles": tiles(columns, validations),
        "facts": [["fact", "value"], *facts(run)],
        "held_out": {
            "charts": [*map(asdict, held_out_charts(columns, validations)), *problem_charts(validations)],
            "answers": before_and_after(validations),
        },
        "charts": training if lengths is None else [*training, lengths],
        "samples": rollouts(thinned(samples)),
        "differences": [[]],
        "config": run.config.read_text(errors="replace") if run.config.is_file() else "",
    }
    return assembled(data)


def assembled(data: Mapping[str, Any]) -> str:
    """The page around its data."""
    title = f"{data['name']} – grpo-pl"
    return whole_page(asset("page.html"), title=title, style=asset("page.css"), script=asset("page.js"), data=data)


def run_name(run: RunFolder) -> str:
    """The name of a run's folder."""
    return run.path.resolve().name


def read_if_there(file: Path, needed: Sequence[str]) -> list[Row]:
    """The rows of a file that older runs, or runs without completions, lack.

    Raises:
        ValueError: a row lacks one of the ``needed`` fields.
    """
    if not file.is_file():
        return []
    rows = []
    for number, _, row in read_lines(file, may_be_cut_short=True):
        check_fields(row, needed, line_name(file, number))
        rows.append(row)
    return rows


def check_fields(row: Row, needed: Sequence[str], where: str) -> None:
    """Refuses what is not of a run.

    Raises:
        ValueError: the first of the ``needed`` fields that lacks; begins with ``where``.
    """
    for name in needed:
        if name not in row:
            raise ValueError(f"{where} has no field {name!r}: it is not of a run of grpo_pl.")


def facts(run: RunFolder) -> list[list[str]]:
    """What was run, as name and value; nothing for a run without ``run.json``."""
    if not run.record.is_file():
        return []
    record = read_object(run.record)
    check_fields(record, IN_RECORD, str(run.record))
    size, trained = record["parameters"], record["trained_parameters"]
    part = "" if size == trained else f", {_short(trained)} of them trained"
    held_out = ", ".join(f"{name} {count}" for name, count in record["data"]["held_out"].items())
    shown = {
        "model": record["model"],
        "parameters": f"{_short(size)}{part}",
        "objective": record["objective"],
        "seed": str(record["seed"]),
        "data": f"{record['data']['source']}, digest {record['data']['digest']}; held out: {held_out}",
        "command": record["command"],
        "started": record["started"].replace("T", " ").replace("+00:00", " UTC"),
        "versions": ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
        "machine": f"{record['machine']['device']}, {record['machine']['system']}, processes: {record['processes']}",
    }
    again = [entry["started"] for entry in record.get("resumed", [])]
    return [*map(list, shown.items()), *([["resumed", ", ".join(again)]] if again else [])]


def tiles(columns: Mapping[str, Points], validations: Sequence[Row] = ()) -> list[dict[str, str]]:
    """The numbers at the top of the page."""
    found = []
    for name, label in {"val/pass@1": "pass@1, sampled", "val/greedy": "greedy", "reward": "reward"}.items():
        if name in columns:
            first, last = columns[name][0][1], columns[name][-1][1]
            measured = validations[-1]["metrics"].get(name) if validations else None
            interval = f" (95 %: {measured['low']:.3f}–{measured['high']:.3f})" if measured else ""
            found.append({"label": label, "value": f"{last:.3f}", "note": f"from {first:.3f}{interval}"})
    if "step_time" in columns:
        seconds = sum(value for _, value in columns["step_time"])
        count = len(columns["step_time"])
        minutes = f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
        found.append({"label": "rollouts", "value": str(count), "note": f"{minutes} without validation"})
    if "num_tokens" in columns:
        tokens = columns["num_tokens"][-1][1]
        found.append({"label": "tokens written", "value": _short(tokens), "note": "by the policy, in training"})
    return found


def rollouts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows grouped by rollout and prompt for the browser of the page; fields that a group shares are stored once."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        group = found.setdefault(row["step"], {}).setdefault(
            row["prompt_id"], {key: row[key] for key in ("prompt", "question", "answer")} | {"completions": []}
        )
        group["completions"].append(_completion(row))
    return [{"step": step + 1, "groups": list(groups.values())} for step, groups in sorted(found.items())]


def _completion(row: Row) -> Row:
    kept = ("completion", "tokens", "finish_reason", "rewards", "correct", "reward", "advantage")
    return {key: row[key] for key in (*kept, *(["episode"] if "episode" in row else []))}


def thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """All rows, or those of every second rollout, fourth, eighth …, until they fit into ``LARGEST_SAMPLES``."""
    sizes: dict[int, int] = {}
    for row in rows:
        written = {**_completion(row), "prompt": row["prompt"] if row["sample"] == 0 else ""}
        sizes[row["step"]] = sizes.get(row["step"], 0) + len(json_in_html(written).encode(errors="replace"))
    steps = sorted(sizes)
    while sum(sizes[step] for step in steps) > LARGEST_SAMPLES and len(steps) > 1:
        steps = steps[::2]
    kept = set(steps)
    return [row for row in rows if row["step"] in kept]


def _short(number: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return f"{number:.0f}"
