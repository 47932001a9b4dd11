"""``grpo-pl compare``: two runs or exports on the same problems, as tables, or as JSON for programs."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_pl.config.objects import ConfigArguments
from grpo_pl.evaluation.curves import read_curves
from grpo_pl.extras.compare import compared
from grpo_pl.extras.compare.comparison import results_table
from grpo_pl.extras.compare.page import check_place, default_place, write_page
from grpo_pl.extras.compare.paired import Answer, PairedProblems

SHOWN = 6
"""Flipped problems of a set that the terminal shows."""
LONGEST = 100
"""Characters of a text there."""
MOST_SETTINGS = 12


def compare(
    a: str,
    b: str,
    samples: int = 1,
    problems: int | None = None,
    config: ConfigArguments = None,
    temperature: float | None = None,
    max_completion_length: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: str = "auto",
    runs_dir: Path = Path("runs"),
    trust_rewards: bool = False,
    output: Path | None = None,
    json: bool = False,
) -> None:
    """Lets two runs or exports answer the same held-out problems with the same keys: which is better, and on what.

    Shows what both, one alone and neither solves, with McNemar's exact test; pass@1 of both and the difference with its
    95 % interval, paired by problem, beside the one that unpaired problems would give; and the problems that flipped,
    with both answers: some of them here, all of them on an HTML page. Of two runs it also shows their curves' ends and
    the settings that differ. Curves of any number of runs: grpo-pl report.

    Args:
        a: a run folder, an export or a checkpoint, or a run's name under runs.
        b: likewise; differences are b minus a.
        samples: completions of each problem; a problem is solved if more than half of them are right.
        problems: most problems of each held-out set; all by default.
        config: configuration that names the problems (data.source); by default those of the runs.
        temperature: of the completions of both; by default that of a's training, 0 is greedy.
        max_completion_length: most tokens of a completion; by default each as in its training.
        seed: names the samples.
        batch_size: completions decoded at once.
        device: cpu, cuda …; auto takes a GPU where there is one.
        runs_dir: where runs are looked for by name.
        trust_rewards: let the two name any class as a reward or a source, such as functions and judges: only if you
            know who wrote them. Without it such a model is refused.
        output: the HTML page with all flipped problems; by default compare-A-B.html beside the folder of a.
        json: print the result as JSON, and write a page only where --output names one.
    """
    if output is not None:
        check_place(output)  # before anything is drawn
    found = compared.compare(
        a,
        b,
        samples=samples,
        problems=problems,
        config=config,
        temperature=temperature,
        max_completion_length=max_completion_length,
        seed=seed,
        batch_size=batch_size,
        device=device,
        runs_dir=runs_dir,
        trust_rewards=trust_rewards,
    )
    if json:
        written = {} if output is None else {"page": str(write_page(found, output))}
        print(json_module.dumps({**found.as_json(), **written}))
        return
    console = Console()
    for name, each in found.sets.items():
        show_set(console, found, name, each)
    runs = {side.run.path.resolve(): side for side in (found.a, found.b) if side.run and side.run.metrics.is_file()}
    if len(runs) == 2:
        named = {path.name: side for path, side in runs.items()}
        named = named if len(named) == 2 else {side.name: side for side in runs.values()}
        console.print(results_table({name: read_curves(side.run.metrics) for name, side in named.items() if side.run}))
    for line in found.settings[:MOST_SETTINGS]:
        console.print(Text(line), soft_wrap=True)
    if len(found.settings) > MOST_SETTINGS:
        console.print(f"… {len(found.settings) - MOST_SETTINGS} more settings differ", highlight=False)
    page, here = write_page(found, output or default_place(found)), Path.cwd()
    console.print(Text(f"page  {page.relative_to(here) if page.is_relative_to(here) else page}"), soft_wrap=True)


def show_set(console: Console, found: compared.Comparison, name: str, each: PairedProblems) -> None:
    """Prints one set of problems: cells, differences with their intervals, and the first that flipped."""
    a, b = found.a.name, found.b.name
    cells, (first, second) = each.cells, (values.mean().item() for values in each.values)
    drawn = f"{found.samples} × temperature {found.temperature:g}, seed {found.seed}"
    table = Table(title=Text(f"{name}: {len(each.pairs)} problems, {drawn}"), title_justify="left")
    for heading in ("", "", "95 % interval"):
        table.add_column(heading, justify="right" if table.columns else "left")
    rows = {
        "solved by both": str(cells["both"]),
        f"solved by {a} only": str(cells["only_a"]),
        f"solved by {b} only": str(cells["only_b"]),
        "solved by neither": str(cells["neither"]),
        "McNemar's exact test": f"p = {each.p_value:.3g}",
        f"pass@1 of {a}": f"{first:.3f}",
        f"pass@1 of {b}": f"{second:.3f}",
        "difference, paired": f"{each.paired.value:+.3f}",
        "difference, as if unpaired": f"{each.unpaired.value:+.3f}",
        "paired / unpaired width": "–" if each.width_ratio is None else f"{each.width_ratio:.2f}",
    }
    intervals = {"difference, paired": each.paired, "difference, as if unpaired": each.unpaired}
    for label, value in rows.items():
        interval = intervals.get(label)
        ends = "" if interval is None else f"{interval.low:+.3f} … {interval.high:+.3f}"
        table.add_row(Text(label), value, ends, end_section=label in ("solved by neither", "McNemar's exact test"))
    console.print(table)
    if found.samples > 1:
        console.print("solved: more than half of the judged answers are right", highlight=False)
    if each.unjudged:
        console.print(f"{each.unjudged} problems are left out: on one side no answer could be judged.", highlight=False)
    if each.flipped:
        gained, lost = cells["only_b"], cells["only_a"]
        title = f"flipped: {gained} that {b} gained, {lost} that it lost"
        table = Table(title=Text(title), title_justify="left")
        for heading in ("problem", "answer", a, b):
            table.add_column(Text(heading), overflow="fold")
        half = [pair for pair in each.flipped if pair.solved[1]][: SHOWN // 2]
        for pair in [*half, *[pair for pair in each.flipped if pair.solved[0]][: SHOWN - len(half)]]:
            one, two = _shown(pair.a), _shown(pair.b)
            table.add_row(_cut(pair.problem.question), _cut(pair.problem.answer), one, two)
        console.print(table)
    console.print()


def _shown(answers: Sequence[Answer]) -> Text:
    """How many answers are right, where there are several, and the first."""
    right = sum(each.correct is True for each in answers)
    counted = f"{right}/{len(answers)} right: " if len(answers) > 1 else ""
    return Text(f"{'✓' if answers[0].correct else '✗'} {counted}") + _cut(answers[0].text)


def _cut(text: str) -> Text:
    """The end of a text, where answers stand, in one line."""
    words = " ".join(text.split())
    return Text(words if len(words) <= LONGEST else f"…{words[1 - LONGEST :]}")
