"""The page of a comparison: one HTML file in the report's style, in which texts of policies are data, not markup."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_pl.callbacks.completions import shortened
from grpo_pl.callbacks.held_out import LONGEST
from grpo_pl.extras.compare.compared import Comparison
from grpo_pl.extras.compare.paired import Answer, PairedProblems
from grpo_pl.extras.report.charts import short
from grpo_pl.extras.report.page import asset, whole_page
from grpo_pl.files.writing import staged

MOST = 400
"""Flipped problems of a set on the page; of more, as many gained ones as lost ones."""


def default_place(found: Comparison) -> Path:
    """Beside the run of the first side, or beside its export."""
    side = found.a
    folder = side.model.source.absolute() if side.run is None else side.run.path
    names = (re.sub(r"[^\w.-]+", "-", each.name).strip("-.") for each in (found.a, found.b))
    return folder.parent / f"compare-{'-'.join(names)}.html"


def check_place(output: Path) -> None:
    """Refuses a place of the page that is no file.

    Raises:
        ValueError: ``output`` is a folder, or what should be its folder is a file.
    """
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: name a file.")
    if not next(folder for folder in output.absolute().parents if folder.exists()).is_dir():
        raise ValueError(f"--output {output} would be inside a file: name another place.")


def write_page(found: Comparison, output: Path) -> Path:
    """Writes the page of a comparison, atomically, and returns its path.

    Raises:
        ValueError: see `check_place`.
    """
    check_place(output)
    title = f"{found.a.name} · {found.b.name} – grpo-pl compare"
    style = asset("page.css") + _own("page.css")
    page = whole_page(_own("page.html"), title=title, style=style, script=_own("page.js"), data=page_data(found))
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged(output) as staging:
        staging.write_text(page, encoding="utf-8", errors="replace")
    return output


def page_data(found: Comparison) -> dict[str, Any]:
    """What the page shows."""
    keys = "shared" if found.shared_keys else "unshared: other tokenizers"
    return {
        "names": [found.a.name, found.b.name],
        "facts": [
            *([side.name, str(side.model.source)] for side in (found.a, found.b)),
            ["completions of a problem", str(found.samples)],
            ["temperature", f"{found.temperature:g}"],
            ["seed", str(found.seed)],
            ["keys", keys],
        ],
        "notes": list(found.notes),
        "several": found.samples > 1,
        "sets": [{"name": name, **_set(each)} for name, each in found.sets.items()],
        "settings": [line.partition(": ")[::2] for line in found.settings],
    }


def _set(each: PairedProblems) -> dict[str, Any]:
    told, (first, second) = each.as_json(), (short(values.mean().item()) for values in each.values)
    gained = [pair for pair in each.flipped if pair.solved[1]]
    lost = [pair for pair in each.flipped if pair.solved[0]]
    kept = [*gained[: MOST // 2], *lost[: MOST // 2]]
    return {
        "problems": len(each.pairs),
        "unjudged": each.unjudged,
        "cells": each.cells,
        "p": short(each.p_value),
        "pass": [first, second],
        "difference": short(each.paired.value),
        "intervals": [
            {"label": label, "low": short(of.low), "high": short(of.high), "method": of.method}
            for label, of in (("paired", each.paired), ("as if unpaired", each.unpaired))
        ],
        "ratio": None if told["pass@1"]["width_ratio"] is None else short(told["pass@1"]["width_ratio"]),
        "left_out": len(each.flipped) - len(kept),
        "flipped": [
            {
                "question": shortened(pair.problem.question, LONGEST),
                "answer": pair.problem.answer,
                "gained": pair.solved[1],
                "sides": [_answers(pair.a), _answers(pair.b)],
            }
            for pair in kept
        ],
    }


def _answers(answers: Sequence[Answer]) -> list[Mapping[str, Any]]:
    """As the report shows completions."""
    return [
        {
            "completion": shortened(each.text, LONGEST),
            "correct": each.correct,
            "tokens": each.tokens,
            "finish_reason": each.finish_reason,
        }
        for each in answers
    ]


def _own(name: str) -> str:
    return resources.files("grpo_pl.extras.compare").joinpath(name).read_text(encoding="utf-8")
