"""The part of a report about single problems: their hardness, and completions before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_pl.files.rows import Row

MOST_VALIDATIONS = 40
"""Columns of the map of problems."""
TENTHS = 10


def problem_charts(validations: Sequence[Row]) -> list[dict[str, Any]]:
    """For each group of held-out problems a map of problems by validation, and how many are how hard before and after;
    nothing for a run without ``held_out.jsonl``."""
    found = []
    for place in dict.fromkeys(place for row in validations for place in row["problems"]):
        rows = [row for row in validations if place in row["problems"]]
        every = -(-len(rows) // MOST_VALIDATIONS)
        rows = [*rows[:-1:every], rows[-1]]  # the last one always
        name = "" if place == "val" else f": {place.removeprefix('val/')}"
        found += [_map(rows, place, name), _hardness([rows[0], rows[-1]], place, name)]
    return found


def _map(rows: Sequence[Row], place: str, name: str) -> dict[str, Any]:
    questions = {
        str(each["id"]): each["question"] for row in rows for each in row.get("answers", []) if each["group"] == place
    }
    rates = {
        i: [_rate(row["problems"][place].get(i)) for row in rows]
        for i in dict.fromkeys(i for row in rows for i in row["problems"][place])
    }
    lines = [
        {"label": f"problem {i}{f': {questions[i][:60]}' if i in questions else ''}", "values": values}
        for i, values in sorted(rates.items(), key=lambda item: [-1.0 if v is None else v for v in item[1]])
    ]
    return {
        "kind": "map",
        "title": f"Problems{name}",
        "note": "share of right samples of each held-out problem at each validation; grey: none could be judged",
        "unit": "share",
        "x": "rollout",
        "columns": [row["step"] for row in rows],
        "rows": lines,
    }


def _hardness(ends: Sequence[Row], place: str, name: str) -> dict[str, Any]:
    """Bars: problems by the share of right samples, at the first validation and at the last."""
    labels = ["0", *(f"≤{tenth / TENTHS:g}" for tenth in range(1, TENTHS)), "<1", "1"]
    ends = ends if ends[0]["step"] != ends[1]["step"] else ends[:1]
    series = []
    for row in ends:
        counts = [0] * len(labels)
        for of in row["problems"][place].values():
            rate = _rate(of)
            if rate is not None:
                counts[0 if rate == 0 else -1 if rate == 1 else 1 + min(TENTHS - 1, int(rate * TENTHS - 1e-9))] += 1
        series.append({"label": f"rollout {row['step']}", "values": counts})
    return {
        "kind": "bars",
        "side": True,
        "title": f"Hardness{name}",
        "note": "problems by the share of their samples that is right",
        "unit": "problems",
        "x": "share right",
        "labels": labels,
        "series": series,
    }


def _rate(counts: Sequence[int] | None) -> float | None:
    return None if not counts or not counts[1] else round(counts[0] / counts[1], 4)


def before_and_after(validations: Sequence[Row]) -> dict[str, Any]:
    """The completions of the first and the last validation of one run, problem by problem."""
    with_answers = [row for row in validations if row.get("answers")]
    ends = {f"rollout {row['step']}": row for row in (*with_answers[:1], *with_answers[-1:])}
    return _sides("Before and after", ends)


def side_by_side(runs: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The completions of the last validation of several runs, problem by problem."""
    last = {name: rows[-1] for name, rows in runs.items() if rows and rows[-1].get("answers")}
    return _sides("After training, run by run", last)


def _sides(title: str, ends: Mapping[str, Row]) -> dict[str, Any]:
    problems: dict[tuple[str, ...], dict[str, Any]] = {}  # by what is asked
    for number, row in enumerate(ends.values()):
        for each in row["answers"]:
            entry = problems.setdefault(
                (each["group"], each["question"], *each.get("images", ())),
                {key: each[key] for key in ("question", "answer", "images") if key in each}
                | {"sides": [None] * len(ends)},
            )
            drawn = {"completions": [_shown(one) for one in each["completions"]]}
            greedy = {"greedy": _shown(each["greedy"])} if "greedy" in each else {}
            entry["sides"][number] = {**drawn, **greedy}
    ordered = sorted(problems.values(), key=lambda problem: _difference(problem["sides"][0], problem["sides"][-1]))
    return {"title": title, "times": list(ends), "problems": ordered}


def _difference(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> tuple[bool, float]:
    """Sorts problems: first those of which the completion that is shown, greedy or the first, which has the same draw
    on both sides, was wrong and became right; then those whose share of right completions differs most."""
    shown = [side and (side.get("greedy") or next(iter(side["completions"]), None)) for side in (first, last)]
    learnt = [None if one is None else one.get("correct") for one in shown] == [False, True]
    return not learnt, -abs(_share(last) - _share(first))


def _share(side: Mapping[str, Any] | None) -> float:
    """Of right completions; where no reward says what is right, the mean reward."""
    completions = [] if side is None else side["completions"]
    values = [one["correct"] is True if "correct" in one else one["rewards"]["reward"]["value"] for one in completions]
    return sum(float(value or 0.0) for value in values) / max(1, len(values))


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    """A held-out completion as the page shows any: its one score as the reward of that name."""
    kept = {key: one[key] for key in ("completion", "tokens", "finish_reason", "correct") if key in one}
    name = "judged" if "correct" in one else "reward"  # the sum, where no reward says what is right
    return {**kept, "rewards": {name: {key: one[key] for key in ("value", "status", "detail")}}}


def length_charts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Bars: lengths of right and wrong completions in the last quarter of the rollouts that were kept; nothing without
    any. The page counts them, with what it counts other values with."""
    if not rows:
        return []
    steps = sorted({row["step"] for row in rows})
    late = steps[-max(1, len(steps) // 4) :]
    judged = any("correct" in row for row in rows)
    groups = []
    for verdict, label, color in (
        (True, "right", "good"),
        (False, "wrong", "bad"),
        (None, "not judged" if judged else "all", "none"),
    ):
        values = [row["tokens"] for row in rows if row["step"] >= late[0] and row.get("correct") is verdict]
        groups += [{"label": label, "color": color, "values": values}] if values else []
    return [
        {
            "kind": "bars",
            "title": "Lengths of right and wrong" if judged else "Lengths of completions",
            "note": f"completions kept of rollouts {late[0] + 1} to {late[-1] + 1}",
            "unit": "completions",
            "x": "tokens",
            "groups": groups,
        }
    ]
