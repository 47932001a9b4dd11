"""Builds the report of several runs: their curves in the same charts, what they answered, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.runs import RunFolder, flat_settings
from grpo_pl.files.writing import staged
from grpo_pl.report.charts import compared_held_out, comparison_charts
from grpo_pl.report.no_signal import no_signal
from grpo_pl.report.page import IN_HELD_OUT, assembled, facts, read_if_there, require_run, run_name
from grpo_pl.report.problems import side_by_side

OF_THE_RUN = ("config", "resume", "ckpt_path", "name", "runs_dir")
"""Settings in which any two runs differ."""


def write_comparison(runs: Sequence[RunFolder], output: Path) -> Path:
    """Writes the report of several runs, atomically, and returns its path.

    Raises:
        ValueError: a folder that holds no ``metrics.csv``, one run twice, or ``output`` is a folder.
    """
    for run in runs:
        require_run(run)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: name a file.")
    named = _named(runs)
    page = assembled(comparison(named))
    with staged(output) as file:
        file.write_text(page, encoding="utf-8", errors="replace")
    return output


def comparison(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    """The data of the page."""
    columns = {name: read_curves(run.metrics) for name, run in runs.items()}
    validations = {name: read_if_there(run.held_out, IN_HELD_OUT) for name, run in runs.items()}
    warnings = [f"{name}: {warning}" for name, of in columns.items() if (warning := no_signal(of))]
    return {
        "name": " · ".join(runs),
        "runs": len(runs),
        "warning": " ".join(warnings),
        "tiles": _tiles(columns),
        "facts": _facts(runs),
        "held_out": {
            "charts": list(map(asdict, compared_held_out(columns, validations))),
            "answers": side_by_side(validations),
        },
        "charts": list(map(asdict, comparison_charts(columns))),
        "samples": [],
        "differences": _differences(runs),
        "config": "",
    }


def _named(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """The runs by name, with their parents' where two bear the same."""
    paths = [run.path.resolve() for run in runs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: a run is not compared with itself.")
    names = [run_name(run) for run in runs]
    return {
        name if names.count(name) == 1 else f"{path.parent.name}/{name}": run
        for name, path, run in zip(names, paths, runs, strict=True)
    }


def _tiles(columns: Mapping[str, Mapping[str, Points]]) -> list[dict[str, str]]:
    """The held-out figure of each run, or its reward where there is none."""
    found = []
    for name, of in columns.items():
        key = next((key for key in ("val/pass@1", "val/greedy", "reward") if key in of), None)
        if key is not None:
            first, last = of[key][0][1], of[key][-1][1]
            note = f"{key.removeprefix('val/')}, from {first:.3f}"
            found.append({"label": name, "value": f"{last:.3f}", "note": note})
    return found


def _facts(runs: Mapping[str, RunFolder]) -> list[list[str]]:
    of = {name: {key: value for key, value in facts(run)} for name, run in runs.items()}
    keys = dict.fromkeys(key for each in of.values() for key in each)
    return [["", *runs], *([key, *(each.get(key, "–") for each in of.values())] for key in keys)]


def _differences(runs: Mapping[str, RunFolder]) -> list[list[str]]:
    """The settings in which the runs differ, a column for each run."""
    settings = {
        name: flat_settings(yaml.safe_load(run.config.read_text(encoding="utf-8")) or {})
        if run.config.is_file()
        else {}
        for name, run in runs.items()
    }
    keys = dict.fromkeys(key for of in settings.values() for key in of if key.partition(".")[0] not in OF_THE_RUN)
    rows = [[key, *(str(of.get(key, "unset")) for of in settings.values())] for key in keys]
    return [["setting", *runs], *(row for row in rows if len(set(row[1:])) > 1)]
