"""``grpo-pl why``: one completion of a run explained, as tables, as JSON for programs, and as a page."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_pl.extras.replay.explanation import Explanation, Token, conclusions

MOST_TOKENS = 80
"""Rows of tokens that a terminal shows; of a longer completion those that were least likely."""
OF_THE_LOSS = ("ratio", "clipped", "weight", "pull")
"""Columns that are often alike at every token."""
VERDICTS = {True: "right", False: "wrong", None: "not judged"}


def why(
    run: Path,
    step: int | None = None,
    prompt: int | None = None,
    sample: int | None = None,
    completion: int | None = None,
    run_rewards: bool = False,
    json: bool = False,
    page: Path | None = None,
) -> int:
    """Explains one completion of a run: its tokens and what else was likely, its rewards, its group and its advantage
    in numbers, what the update of that step made of it, and what later weights answer by the same key.

    Name it by --step, --prompt and --sample, or by --completion. Its step is made again from the nearest checkpoint and
    held to the record; the run is never changed. The same stands in a page, one HTML file.

    Args:
        run: the folder of a run, or its name under runs.
        step: the rollout, from 0, as in completions.jsonl; the report's number less 1.
        prompt: the problem (prompt_id in completions.jsonl).
        sample: the number of the completion in its group, from 0.
        completion: a line of completions.jsonl, from 1, in place of these three.
        run_rewards: run rewards, judges, agents and environments of your own again, which may cost money.
        json: print everything as JSON; a page is written only if --page asks for it.
        page: file of the page; by default why-RUN-STEP-PROMPT-SAMPLE.html beside the run folder.
    """
    from grpo_pl.extras.replay.explanation import why as explain
    from grpo_pl.extras.replay.recorded import RecordedRun
    from grpo_pl.extras.replay.why_page import page_file, write_page

    recorded = RecordedRun.open(run)
    if page is not None:
        page_file(recorded, page, "")  # before anything is made again
    found = explain(recorded, step=step, prompt=prompt, sample=sample, completion=completion, run_rewards=run_rewards)
    name = f"why-{recorded.path.resolve().name}-{found.step}-{found.prompt_id}-{found.sample}"
    file = page_file(recorded, page, name) if page is not None or not json else None
    hand_out(found, show, write_page, json=json, file=file)
    return 0


def hand_out(
    found: Any,
    show: Callable[[Any, Console], None],
    write: Callable[[Any, Path], None],
    *,
    json: bool,
    file: Path | None,
) -> None:
    """Prints what a command found, as tables or as JSON, and writes its page where a file is given."""
    if json:
        print(json_module.dumps(found.as_json()))
    else:
        show(found, Console())
    if file is not None:
        write(found, file)
        print(f"page      {file}", file=sys.stderr if json else sys.stdout)


def show(found: Explanation, console: Console) -> None:
    """Prints an explanation; texts of the policy are shown as they are, never as markup."""

    line, table = partial(show_line, console), partial(show_table, console)
    line(f"{found.run}, step {found.step} (rollout {found.step + 1}), prompt {found.prompt_id}, sample {found.sample}")
    line(f"asked     {shown(found.prompt)}" + (f"   gold answer {shown(found.answer)}" if found.answer else ""))
    line(f"answered  {shown(found.completion)}")
    line(f"          {summary(found)}")
    table(
        "Rewards",
        ("reward", "value", "weight", "status", "detail"),
        [
            (each.name, number(each.value), number(each.weight), each.status, shown(each.detail))
            for each in found.rewards
        ],
        {"detail"},
    )
    table(
        "Its advantage, line by line",
        ("", "in numbers", "value"),
        [(each.what, each.sum, number(each.value)) for each in found.arithmetic],
        {"", "in numbers"},
    )
    table(
        "Its group, and the log-probability of each completion before and after the update",
        ("sample", "completion", "verdict", "reward", "advantage", "before", "after", "change"),
        [
            (
                f"{each.sample}{' ←' if each.sample == found.sample else ''}",
                shortened(shown(each.completion), console.width // 4),
                VERDICTS[each.correct] if each.in_loss else "not in loss",
                number(each.reward),
                signed(each.advantage),
                f"{each.before:.2f}",
                f"{each.after:.2f}",
                f"{each.after - each.before:+.2f}",
            )
            for each in found.group
        ],
        {"completion"},
    )
    rows, common = token_rows(found.tokens)
    table(f"Its tokens{told_of_tokens(found)}", [*rows[0]], [[*row.values()] for row in rows], {"others"})
    if common:
        line(f"at every token: {', '.join(f'{name} {value}' for name, value in common.items())}")
    if found.later:
        table(
            "The same key under later weights",
            ("rollouts", "completion", "verdict", "reward", "parts at token"),
            [
                (
                    str(each.rollouts),
                    shortened(shown(each.completion), console.width // 3),
                    VERDICTS[each.correct],
                    number(each.reward),
                    "same" if each.parts_at is None else f"{each.parts_at}: {shown(each.there)} → {shown(each.here)}",
                )
                for each in found.later
            ],
            {"completion"},
        )
    line("")
    for told in conclusions(found):
        line(told)


def show_line(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(Text(text), soft_wrap=True)


def show_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[str]
) -> None:
    """Prints a table below its title.

    Args:
        texts: the columns that fold; numbers stand in the others.
    """
    show_line(console, f"\n{title}")
    numbers = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in columns:
        folds = name in texts
        numbers.add_column(name, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    for row in rows:
        numbers.add_row(*map(Text, row))
    console.print(numbers)


def summary(found: Explanation) -> str:
    """Verdict, reward and advantage in a line."""
    return (
        f"{VERDICTS[found.correct]}, reward {number(found.reward)}, advantage {signed(found.advantage)}, "
        f"{len(found.tokens)} tokens, ended by {found.finish_reason}"
    )


def told_of_tokens(found: Explanation) -> str:
    """How many tokens are left out."""
    count = len(found.tokens)
    return "" if count <= MOST_TOKENS else f": the {MOST_TOKENS} least likely of {count}; --json has all"


def token_rows(tokens: Sequence[Token]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The tokens that fit, as cells by the names of their columns, and what is the same at every token."""
    numbered = list(enumerate(tokens))
    if len(numbered) > MOST_TOKENS:
        chosen = sorted(numbered, key=lambda one: 2.0 if one[1].probability is None else one[1].probability)
        numbered = sorted(chosen[:MOST_TOKENS], key=lambda one: one[0])
    rows = [token_row(place, token) for place, token in numbered]
    written = [row for row, (_, token) in zip(rows, numbered, strict=True) if token.written]
    common = {name: written[0][name] for name in OF_THE_LOSS if written and len({row[name] for row in written}) == 1}
    kept = [{name: cell for name, cell in row.items() if name not in common} for row in rows]
    return kept, {name: value for name, value in common.items() if value}


def token_row(place: int, token: Token) -> dict[str, str]:
    """A token as cells of the table; ``p`` is its probability before the update, and ``change`` that of its logarithm
    in the update."""
    likely = [other for other in token.others if other.probability >= 0.001]
    return {
        "": str(place),
        "token": shown(token.text),
        "p": "read" if token.probability is None else f"{token.probability:.4f}",
        "change": "" if token.after is None else f"{token.after - (token.logprob or 0.0):+.3f}",
        "entropy": "" if token.entropy is None else f"{token.entropy:.3f}",
        "others": "  ".join(f"{shown(other.text)} {other.probability:.3f}" for other in likely),
        "ratio": "" if token.ratio is None else f"{token.ratio:.4f}",
        "clipped": "" if token.clipped is None else "yes" if token.clipped else "no",
        "weight": "" if token.weight is None else f"{token.weight:.3g}",
        "pull": "" if token.pull is None else f"{token.pull:+.2e}",
    }


def shown(text: str) -> str:
    """A text in one line, in which nothing steers the terminal."""
    return repr(text)[1:-1].replace("\\\\", "\\").replace("\\'", "'")


def shortened(text: str, most: int) -> str:
    """The end of a long text, where its answer stands."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def number(value: float | None) -> str:
    """Four digits, or none."""
    return "none" if value is None else f"{value:.4g}"


def signed(value: float) -> str:
    """A number with its sign."""
    return f"{value:+.4f}"
