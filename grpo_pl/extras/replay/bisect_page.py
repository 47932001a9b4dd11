"""The page of a search for the step that taught an answer: one HTML file in the style of the report."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from grpo_pl.extras.replay.bisection import Bisection, conclusions, named, why_of
from grpo_pl.extras.report.charts import Chart, chart
from grpo_pl.extras.report.page import whole_page
from grpo_pl.files.writing import staged


def write_page(found: Bisection, file: Path) -> None:
    """Writes the page, atomically."""
    with staged(file) as staging:
        staging.write_text(build_page(found), encoding="utf-8", errors="replace")


def build_page(found: Bisection) -> str:
    """The HTML text of the page."""
    title = f"{Path(found.run).resolve().name}: when was it learned?"
    data = {
        "title": title,
        "found": found.as_json(),
        "conclusions": conclusions(found),
        "names": [named(group) for group in found.groups],
        "why": why_of(found),
        "charts": [_chart(found)],
    }
    page, style, script = (
        resources.files("grpo_pl.extras.replay").joinpath(f"bisect.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    return whole_page(page, title=f"{title} – grpo-pl", style=style, script=script, data=data)


def _chart(found: Bisection) -> Chart:
    lines = {"right answer": list(found.curve)}
    if found.steepest is not None:
        at = dict(found.curve)
        lines["the steepest step"] = [(n, at[n]) for n in (found.steepest, found.steepest + 1)]
    return chart("Log-probability", "of the right answer, under the weights after each rollout", "nats", lines)
