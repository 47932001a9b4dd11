"""Builds the report of one run or several: one HTML file without external resources, in which the texts of runs are
data, not markup."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_pl.evaluation.curves import Points, no_signal, read_curves
from grpo_pl.extras.report.charts import charts, compared_held_out, comparison_charts, held_out_charts, short
from grpo_pl.extras.report.problems import before_and_after, length_charts, problem_charts, side_by_side
from grpo_pl.files.rows import Row, line_name, read_lines, read_object
from grpo_pl.files.runs import RunFolder, flat_settings, read_settings
from grpo_pl.files.writing import staged

STYLE, SCRIPT = "theme.css", ("charts.js", "completions.js")
"""Parts of every page; each adds its own."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a page that is a file may load: nothing."""
LARGEST_SAMPLES = 8_000_000
"""Most bytes of samples in a report; beyond, it shows every second rollout only, or every fourth, eighth …"""
LARGEST_IMAGES = 6_000_000
"""Most bytes of the images of samples in a report; the others are named only."""

NEEDED = {
    "completions.jsonl": (
        *("step", "prompt_id", "sample", "prompt", "question", "answer", "completion", "tokens", "finish_reason"),
        *("rewards", "correct", "reward", "advantage"),
    ),
    "held_out.jsonl": ("step", "metrics", "problems", "pass_at"),
    "run.json": (
        *("model", "parameters", "trained_parameters", "objective", "seed", "data", "command", "started", "versions"),
        *("machine", "processes"),
    ),
}
"""Fields of a run's files without which there is no report."""
OF_THE_RUN = ("config", "resume", "ckpt_path", "name", "runs_dir")
"""Settings in which any two runs differ."""


def write_report(run: RunFolder) -> Path:
    """Writes ``report.html`` into a run's folder, atomically, and returns its path."""
    require_run(run)
    return _written(build_page(run), run.report)


def write_comparison(runs: Sequence[RunFolder], output: Path) -> Path:
    """Writes the report of several runs, atomically, and returns its path."""
    for run in runs:
        require_run(run)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: name a file.")
    paths = [run.path.resolve() for run in runs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: a run is not compared with itself.")
    named = {_shortest_name(path, paths): run for path, run in zip(paths, runs, strict=True)}
    return _written(_page(comparison_data(named)), output)


def _written(page: str, file: Path) -> Path:
    with staged(file) as staging:
        staging.write_text(page, encoding="utf-8", errors="replace")
    return file


def _shortest_name(path: Path, paths: Sequence[Path]) -> str:
    """The last parts of a path that no other one ends in, as few as possible."""
    ends = (path.parts[-n:] for n in range(1, len(path.parts) + 1))
    return str(Path(*next(end for end in ends if sum(other.parts[-len(end) :] == end for other in paths) == 1)))


def require_run(run: RunFolder) -> None:
    """Refuses a folder without ``metrics.csv``."""
    if not run.metrics.is_file():
        raise ValueError(f"{run.path} holds no metrics.csv: give the folder of a run, such as runs/quickstart.")


def build_page(run: RunFolder) -> str:
    """The HTML text of the report."""
    columns, validations = read_curves(run.metrics), read_if_there(run.held_out)
    samples = read_if_there(run.completions)
    if "val/reward" in columns:  # no reward says what is right, and nobody was asked
        samples = [{key: value for key, value in row.items() if key != "correct"} for row in samples]
    branch = read_object(run.branch) if run.branch.is_file() else None
    data = {
        "name": run.path.resolve().name,
        "runs": 1,
        "warning": no_signal(columns),
        "tiles": tiles(columns, validations),
        "facts": [["fact", "value"], *facts(run), *(branch_facts(branch) if branch else [])],
        "held_out": {
            "charts": [*held_out_charts(columns, validations), *problem_charts(validations)],
            "answers": before_and_after(validations),
        },
        "charts": [*(branch_charts(run, columns, branch) if branch else []), *charts(columns), *length_charts(samples)],
        "samples": rollouts(shown := thinned(samples)),
        "images": thumbnails(shown, run.images) | _held_out_images([run], [validations]),
        "why": f"grpo-pl why {shlex.quote(str(run.path))}" if run.config.is_file() and run.record.is_file() else "",
        "differences": [[]],
        "config": run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else "",
    }
    return _page(data)


def branch_charts(run: RunFolder, columns: Mapping[str, Points], branch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The curves of a branch and of the run that it was taken from, side by side from the branch on."""
    after = {name: [point for point in points if point[0] > branch["step"]] for name, points in columns.items()}
    other = {name: [(at, value) for at, value in points] for name, points in branch["curves"].items()}
    ours = f"{run.path.resolve().name} (branch)"
    both = {branch["run"]: other, ours: {name: points for name, points in after.items() if points}}
    return [*compared_held_out(both, {name: [] for name in both}), *comparison_charts(both)]


def branch_facts(branch: Mapping[str, Any]) -> list[list[str]]:
    """Where a run was branched off, what was changed, and what became different first."""
    found = [["branch of", f"{branch['run']}, before rollout {branch['step'] + 1}"]]
    found += [["changed there", "; ".join(branch["changes"]) or "nothing"]]
    if "first" not in branch:
        return found
    first, other = branch["first"], branch["completion"]
    if first is None:
        return [*found, ["first difference", f"none: {branch['compared']} rollouts are equal bit for bit"]]
    found += [["first difference", f"rollout {first['step'] + 1}, {first['what']}: {first['there']} → {first['here']}"]]
    if other is not None:
        of = f"rollout {other['step'] + 1}, prompt {other['prompt_id']} ({other['question']}), sample {other['sample']}"
        found += [["first other completion", f"{of}: {other['there']} → {other['here']}"]]
    return found


def comparison_data(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    """The data of the page of several runs, by their names."""
    columns = {name: read_curves(run.metrics) for name, run in runs.items()}
    validations = {name: read_if_there(run.held_out) for name, run in runs.items()}
    warnings = [f"{name}: {warning}" for name, of in columns.items() if (warning := no_signal(of))]
    last = []
    for name, of in columns.items():  # the held-out metric of each run, or its reward where there is none
        key = next((key for key in ("val/pass@1", "val/greedy", "val/reward", "reward") if key in of), None)
        if key is not None:
            last.append({"label": name, "note": key.removeprefix("val/"), **_ends(of[key])})
    known = {name: {key: value for key, value in facts(run)} for name, run in runs.items()}
    keys = dict.fromkeys(key for each in known.values() for key in each)
    return {
        "name": " · ".join(runs),
        "runs": len(runs),
        "warning": " ".join(warnings),
        "tiles": last,
        "facts": [["", *runs], *([key, *(each.get(key, "–") for each in known.values())] for key in keys)],
        "held_out": {
            "charts": compared_held_out(columns, validations),
            "answers": side_by_side(validations),
        },
        "charts": comparison_charts(columns),
        "samples": [],
        "images": _held_out_images(list(runs.values()), list(validations.values())),
        "why": "",
        "differences": _differences(runs),
        "config": "",
    }


def _differences(runs: Mapping[str, RunFolder]) -> list[list[str]]:
    """The settings in which the runs differ, a column for each run."""
    settings = {
        name: flat_settings(read_settings(run.config.read_text(encoding="utf-8")) or {}) if run.config.is_file() else {}
        for name, run in runs.items()
    }
    keys = dict.fromkeys(key for of in settings.values() for key in of if key.partition(".")[0] not in OF_THE_RUN)
    rows = [[key, *(str(of.get(key, "unset")) for of in settings.values())] for key in keys]
    return [["setting", *runs], *(row for row in rows if len(set(row[1:])) > 1)]


def read_if_there(file: Path) -> list[Row]:
    """The rows of a file that older runs, or runs without completions, lack."""
    lines = read_lines(file, may_be_cut_short=True) if file.is_file() else ()
    return [_checked(row, file, line_name(file, number)) for number, _, row in lines]


def _checked(row: Row, file: Path, where: str) -> Row:
    """Refuses what is not of a run."""
    lacking = next((name for name in NEEDED[file.name] if name not in row), None)
    if lacking is not None:
        raise ValueError(f"{where} has no field {lacking!r}: it is not of a run of grpo_pl.")
    return row


def facts(run: RunFolder) -> list[list[str]]:
    """Facts of a run as name and value; none for a run without ``run.json``."""
    if not run.record.is_file():
        return []
    record = _checked(read_object(run.record), run.record, str(run.record))
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


def _ends(points: Points) -> dict[str, float]:
    return {"first": short(points[0][1]), "value": short(points[-1][1])}


def tiles(columns: Mapping[str, Points], validations: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """The numbers at the top of the page."""
    found: list[dict[str, Any]] = []
    labels = {"val/pass@1": "pass@1, sampled", "val/greedy": "greedy", "val/reward": "reward, held out"}
    for name, label in {**labels, "reward": "reward"}.items():
        if name in columns:
            measured = validations[-1]["metrics"].get(name) if validations else None
            interval = {"interval": [short(measured["low"]), short(measured["high"])]} if measured else {}
            found.append({"label": label, **_ends(columns[name]), **interval})
    if times := columns.get("step_time"):
        minutes, seconds = divmod(int(sum(value for _, value in times)), 60)
        note = f"{minutes} min {seconds:02d} s without validation"
        found.append({"label": "rollouts", "value": str(len(times)), "note": note})
    if "num_tokens" in columns:
        tokens = columns["num_tokens"][-1][1]
        found.append({"label": "tokens written", "value": _short(tokens), "note": "by the policy, in training"})
    return found


def rollouts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows grouped by rollout and prompt for the browser of the page; fields that a group shares are stored once. The
    id of a prompt is a text, since it has 64 bits and a script's numbers are exact to 53."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        group = found.setdefault(row["step"], {}).setdefault(
            row["prompt_id"],
            {"prompt_id": str(row["prompt_id"])}
            | {key: row[key] for key in ("prompt", "question", "answer", "images") if key in row}
            | {"completions": []},
        )
        group["completions"].append(_completion(row))
    return [{"step": step + 1, "groups": list(groups.values())} for step, groups in sorted(found.items())]


def thumbnails(rows: Iterable[Row], folder: Path) -> dict[str, str]:
    """Digest -> ``data:`` URL of each image of these rows whose small copy is in the folder, as long as there is
    room."""
    found: dict[str, str] = {}
    left = LARGEST_IMAGES
    for digest in dict.fromkeys(digest for row in rows for digest in row.get("images", ())):
        file = folder / f"{digest}.png"
        if not re.fullmatch("[0-9a-f]{64}", str(digest)) or not file.is_file() or file.stat().st_size > left:
            continue
        content = file.read_bytes()
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            left -= len(content)
            found[digest] = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return found


def _held_out_images(runs: Sequence[RunFolder], validations: Sequence[Sequence[Row]]) -> dict[str, str]:
    """The thumbnails of the held-out problems whose answers are shown."""
    found: dict[str, str] = {}
    for run, rows in zip(runs, validations, strict=True):
        found |= thumbnails((each for row in rows for each in row.get("answers", ())), run.held_out_images)
    return found


def _completion(row: Row) -> Row:
    kept = ("sample", "completion", "tokens", "finish_reason", "rewards", "reward", "advantage")
    return {key: row[key] for key in (*kept, *(key for key in ("correct", "episode") if key in row))}


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


def _page(data: Mapping[str, Any]) -> str:
    """The HTML text of a report around its data."""
    title = f"{data['name']} – grpo-pl"
    return whole_page(asset("page.html"), title=title, style=asset("page.css"), script=asset("page.js"), data=data)


def whole_page(body: str, *, title: str, style: str, script: str, data: Any = None) -> str:
    """A page without external resources around a ``body``.

    Args:
        body: the HTML between ``<body>`` and the scripts.
        style: what comes after the shared style, and ``script`` what comes after the shared scripts.
        data: JSON values of a page that is a file, which may load nothing; whatever stands in them stays data.
    """
    policy, held = "", ""
    if data is not None:
        policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        held = f'<script type="application/json" id="data">{json_in_html(data)}</script>\n'
    scripts = "\n".join([*map(asset, SCRIPT), script])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{policy}<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{asset(STYLE)}{style}</style>
</head>
<body>
{body}{held}<script>{scripts}</script>
</body>
</html>
"""


def json_in_html(data: Any) -> str:
    """``data`` as JSON for a script element; escapes whatever in a string could end that element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def asset(name: str) -> str:
    """The text of a file of this folder."""
    return resources.files("grpo_pl.extras.report").joinpath(name).read_text(encoding="utf-8")
