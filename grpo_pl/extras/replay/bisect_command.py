"""``grpo-pl bisect``: which step of a run taught it an answer, as tables, as JSON for programs, and as a page."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from rich.console import Console

from grpo_pl.extras.replay.bisection import Bisection, conclusions, named, why_of
from grpo_pl.extras.replay.why_command import hand_out, shortened, show_line, show_table, shown

MOST_ROWS = 24
"""Rows of the curve in a terminal, besides the steepest step and the ends of the rise."""
BAR = 30
"""Characters of the longest bar."""


def bisect(
    run: Path,
    question: str,
    answer: str | None = None,
    disk: float | None = None,
    run_rewards: bool = False,
    json: bool = False,
    page: Path | None = None,
) -> int:
    """Finds the step of a run that taught it the right answer to a question, and the groups of that step that did.

    The run is played forward once, held to its record, and the log-probability of the right answer is measured after
    every rollout. The update of the steepest step is made again without each of its groups in turn. Where no single
    step did it, that is said, with the curve. The run is never changed. The same stands in a page, one HTML file.

    Args:
        run: the folder of a run, or its name under runs.
        question: as it stands in the data, before the template.
        answer: the right completion, word by word; or the gold answer of a question that the run recorded, or a part of
            a demonstration of it. By default the demonstration of the run's files, or the last right completion.
        disk: gigabytes of states to keep on the way, one every √N rollouts or fewer; by default the cache's limit.
        run_rewards: run rewards and judges of your own again, which may cost money.
        json: print everything as JSON; a page is written only if --page asks for it.
        page: file of the page; by default bisect-RUN-QUESTION.html beside the run folder.
    """
    from grpo_pl.extras.replay.bisect_page import write_page
    from grpo_pl.extras.replay.bisection import bisect as find
    from grpo_pl.extras.replay.recorded import RecordedRun
    from grpo_pl.extras.replay.why_page import page_file

    recorded = RecordedRun.open(run)
    asked = re.sub(r"\W+", "-", question).strip("-")[:40]
    file = page_file(recorded, page, f"bisect-{recorded.path.resolve().name}-{asked}")  # before anything is made again
    found = find(recorded, question, answer=answer, disk=disk, run_rewards=run_rewards)
    hand_out(found, show, write_page, json=json, file=file if page is not None or not json else None)
    return 0


def show(found: Bisection, console: Console) -> None:
    """Prints what was found; texts are shown as they are, never as markup."""
    line, table = partial(show_line, console), partial(show_table, console)
    line(f"{found.run}, {len(found.curve) - 1} rollouts")
    line(f"asked     {shown(found.prompt)}" + (f"   gold answer {shown(found.answer)}" if found.answer else ""))
    line(f"scored    {shown(found.scored)}")
    line(f"          {found.origin}, {found.tokens} tokens")
    table(
        "Its log-probability under the weights after each rollout",
        ("rollouts", "nats", "change", ""),
        curve_rows(found),
        (),
    )
    if found.groups:
        told = f", the {len(found.groups)} of {found.all_groups} that moved it most"
        table(
            f"The update of step {found.looked_at} without each of its groups, and by how much each moved the answer"
            f"{told if len(found.groups) < found.all_groups else ''}",
            ("left out", "question", "answer", "right", "nats without", "at once", "in all"),
            [
                (
                    named(group),
                    shortened(shown(group.question), console.width // 4),
                    shortened(shown(group.answer), console.width // 4),
                    "" if group.right is None else f"{group.right}/{group.size}",
                    f"{group.without:.3f}",
                    f"{group.moved:+.3f}",
                    f"{group.lasting:+.3f}",
                )
                for group in found.groups
            ],
            {"question", "answer"},
        )
    line("")
    for told in conclusions(found):
        line(told)
    if command := why_of(found):
        line(f"why?      {command}")


def curve_rows(found: Bisection) -> list[tuple[str, str, str, str]]:
    """Points of the curve as cells: about `MOST_ROWS`, the ends of the rise and of the steepest step among them."""
    last = len(found.curve) - 1
    chosen = {0, last, *range(0, last, -(-len(found.curve) // MOST_ROWS))}
    first = found.curve[0][0]
    chosen |= {found.lowest - first, found.highest - first}
    if found.steepest is not None:
        chosen |= {found.steepest - first, found.steepest + 1 - first}
    values = [value for _, value in found.curve]
    low, spread = min(values), (max(values) - min(values)) or 1.0
    rows, before = list[tuple[str, str, str, str]](), values[0]
    for place in sorted(chosen):
        rollouts, value = found.curve[place]
        mark = " ← the steepest step" if found.steepest is not None and rollouts == found.steepest + 1 else ""
        bar = "█" * (1 + round((BAR - 1) * (value - low) / spread))
        rows.append((str(rollouts), f"{value:.3f}", f"{value - before:+.3f}" if place else "", bar + mark))
        before = value
    return rows
