"""``grpo-pl score``: scores given completions without a model, as a table and as JSONL; tests rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from grpo_pl.config.objects import ConfigArguments, settings
from grpo_pl.config.suggestions import nearest
from grpo_pl.data.cells import content_text
from grpo_pl.files.rows import check_output, row_writer
from grpo_pl.files.tables import ENDINGS, format_of, table_rows
from grpo_pl.rewards.base import Reward, Score, Status, require_correctness
from grpo_pl.rewards.batch import ScoredBatch, check_rewards, score_completions
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.training.progress import progress_bar

STATUSES = get_args(Status)
_PARTS = ("text", "image")
SHOWN = 5
"""Bad gold answers and disagreements that are printed; the output file has them all."""


@dataclass
class ScoreSummary:
    """Counts over all rows; their number does not depend on the number of rows."""

    rows: int = 0
    total: float = 0.0
    valued: int = 0
    correct: int = 0
    judged: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad_golds: int = 0
    expectations: int = 0
    disagreements: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if all gold answers could be read and all expectations were met."""
        return self.bad_golds == 0 and self.disagreements == 0

    def count(self, scores: Mapping[str, Mapping[str, Any]], total: float | None, correct: bool | None) -> None:
        """Adds one completion: its scores by reward, their weighted sum, and whether it is right."""
        self.rows += 1
        if total is not None:
            self.total += total
            self.valued += 1
        if correct is not None:
            self.correct += correct
            self.judged += 1
        for name, one in scores.items():
            self.statuses[name, one["status"]] += 1
            if one["value"] is not None:
                self.sums[name] += one["value"]  # type: ignore[assignment]  # Counter holds floats as well
                self.values[name] += 1

    def add_example(self, text: str) -> None:
        if len(self.examples) < SHOWN:
            self.examples.append(text)


def score(
    file: str,
    config: ConfigArguments = None,
    output: str | None = None,
    completion_column: str = "completion",
    answer_column: str = "answer",
    batch_size: int = 512,
    images: bool = False,
) -> int:
    """Scores the completions of a file with the rewards of a configuration.

    Of exchanges of several turns, lists of messages, the last action is scored, or with `rewards_see: exchange` in
    `model.episodes` all turns, written in the form of its `plain_turns`.

    Prints a table and writes one JSON object a row: the row itself, its `scores` by reward, their weighted `reward`
    and whether it is `correct`. A row may carry `expected`: a number, true or false for the value of the correctness
    reward, null for no value, or the name of a status such as timeout. The exit status is 1 if an expectation was not
    met or a gold answer could not be judged against without that being expected. Ctrl-C leaves no output behind.

    Args:
        file: JSONL, JSON, CSV or Parquet, by its ending, with a completion, an answer, and other columns for rewards.
            Prompts and completions may be text or lists of chat messages, as `grpo-pl predict` writes them; `messages`
            may stand for both. An answer that is a list or an object is `bad_gold`.
        config: YAML with `rewards`, or `model.rewards` as in the configuration of a training run.
        output: JSONL file to write; beside the input by default, as NAME.scores.jsonl.
        completion_column: column of the completions, prefilled text included.
        answer_column: column of the gold answers.
        batch_size: rows scored at a time.
        images: read the images of rows, in columns image or images or in the messages of prompts, for rewards that ask
            for `images`. Paths are relative to the file.
    """
    if config is None:
        raise ValueError("--config is missing: give a YAML file with `rewards`, such as the configuration of a run.")
    rewards, episodes = load_rewards(config)
    source = Path(file)
    target = Path(output) if output is not None else source.with_name(f"{source.stem}.scores.jsonl")
    with ExitStack() as stack:
        for reward in rewards:
            stack.enter_context(closing(reward))
        summary = score_file(
            source,
            rewards,
            output=target,
            completion_column=completion_column,
            answer_column=answer_column,
            batch_size=batch_size,
            episodes=episodes,
            images=images,
        )
    print_summary(summary, rewards, Console())
    print(f"scores: {target}")
    return 0 if summary.passed else 1


def load_rewards(config: ConfigArguments) -> tuple[list[Reward], EpisodeSettings]:
    """The rewards under ``rewards`` or ``model.rewards`` of a YAML file, and what they see of an exchange."""
    given = settings(config, "rewards", "model.rewards", "model.episodes")
    key = next((key for key in ("rewards", "model.rewards") if key in given), None)
    if key is None:
        raise ValueError(f"{' and '.join(given.files)} has neither `rewards` nor `model.rewards`.")
    rewards = given.build(key, list[Reward])
    check_rewards(rewards)
    return rewards, given.build("model.episodes", EpisodeSettings)


def score_file(
    file: Path,
    rewards: Sequence[Reward],
    *,
    output: Path | None = None,
    completion_column: str = "completion",
    answer_column: str = "answer",
    batch_size: int = 512,
    episodes: EpisodeSettings = EpisodeSettings(),  # noqa: B008 - frozen
    images: bool = False,
) -> ScoreSummary:
    """Scores a file of rows in batches; 8 bytes a row stay in memory.

    Args:
        output: JSONL file for the scored rows; none is written by default.
        episodes: what of an exchange rewards read as its completion.
        images: read the images of rows.
    """
    if file.is_file() and not format_of(file):
        raise ValueError(f"{file} is neither {ENDINGS}.")
    total, source = table_rows(file, [answer_column, "prompt"])
    if total == 0:
        raise ValueError(f"{file} holds no rows.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if output is not None:
        check_output(output, file)
    names, summary = (completion_column, answer_column), ScoreSummary()
    with progress_bar("score", total) as advance, row_writer(output) as write, closing(source) as rows:
        while batch := list(islice(rows, batch_size)):
            if any("expected" in row for row in batch):
                require_correctness(rewards, "the column `expected`")
            first = summary.rows + 1
            whole = [_whole(row, names[0]) for row in batch]
            if images:
                from grpo_pl.extras.images.row_images import row_with_images

                whole = [
                    row_with_images(row, "prompt", file=file, number=number, option="--images")
                    for number, row in enumerate(whole, start=first)
                ]
            texts, golds, columns = _arrange(whole, names, first, episodes)
            scored = score_completions(rewards, completions=texts, answers=golds, columns=columns)
            for row in _describe(batch, scored, summary, first, answer_column):
                write(row)
            advance(summary.rows)
    return summary


def _arrange(
    batch: Sequence[Mapping[str, Any]], names: tuple[str, str], first: int, episodes: EpisodeSettings
) -> tuple[list[str], list[str | None], dict[str, list[Any]]]:
    """(completions, answers, further columns) of a batch whose first row has the number ``first``."""
    completion, answer = names
    texts = []
    for number, row in enumerate(batch, start=first):
        for name in names:
            if row.get(name) is None:
                raise ValueError(f"row {number} has no {name!r}; its columns are {sorted(row)}.")
        text = _seen(row[completion], episodes)
        if text is None:
            told = f"{completion!r} must be text or a list of messages, got {row[completion]!r}."
            raise ValueError(f"row {number}: {told}")
        texts.append(text)
    further = dict.fromkeys(key for row in batch for key in row if key not in names)
    columns = {key: [row.get(key) for row in batch] for key in further}
    asked = [row.get("prompt") for row in batch]
    columns["prompt"] = [_message_text(prompt) or "" for prompt in asked]
    if all(isinstance(prompt, list) for prompt in asked):
        columns.setdefault("prompt_messages", asked)
    golds = [row[answer] for row in batch]
    return texts, [str(gold) if isinstance(gold, str | int | float) else None for gold in golds], columns


def _whole(row: Mapping[str, Any], completion: str) -> Mapping[str, Any]:
    """The row, with ``messages`` cut into prompt and completion where it has no completion of its own."""
    messages = row.get("messages")
    if row.get(completion) is not None or not isinstance(messages, list):
        return row
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if "assistant" not in roles:
        return row
    first = roles.index("assistant")
    return {"prompt": messages[:first], **row, completion: messages[first:]}


def _seen(completion: Any, episodes: EpisodeSettings) -> str | None:
    """The text that rewards read: of an exchange its last action, or all of it in the form of plain turns."""
    if episodes.rewards_see == "last_action" or not isinstance(completion, list) or len(completion) < 2:
        return _message_text(completion)
    texts = [_message_text([message]) for message in completion]
    if None in texts:
        return None
    form = episodes.plain_turns.observation
    said = zip(completion, texts, strict=True)
    return "".join(str(t) if m.get("role") == "assistant" else form.replace("{observation}", str(t)) for m, t in said)


def _message_text(value: Any) -> str | None:
    """The text itself, or that of the last message of a chat; None for anything else."""
    last = value[-1] if isinstance(value, list) and value else value
    text = last.get("content") if isinstance(last, dict) else value
    if isinstance(text, list) and text and all(isinstance(p, dict) and p.get("type") in _PARTS for p in text):
        return content_text(text)
    return text if isinstance(text, str) else None


def _describe(
    batch: Sequence[dict[str, Any]], scored: ScoredBatch, summary: ScoreSummary, first: int, answer_column: str
) -> Iterator[dict[str, Any]]:
    """The rows to write; counts each in the summary."""
    correct = scored.correct()
    for offset, (row, total, judged) in enumerate(zip(batch, scored.totals(), scored.judged(), strict=True)):
        scores = scored.described(offset)
        summary.count(scores, total, correct[offset])
        written = {**row, "scores": scores, "reward": total, "correct": correct[offset], **scored.extra_of(offset)}
        if "expected" in row:
            written["agrees"] = meets(_expectation(row["expected"], first + offset), judged)
            summary.expectations += 1
            summary.disagreements += not written["agrees"]
        if judged.status == "bad_gold" and not written.get("agrees", False):
            summary.bad_golds += 1
            summary.add_example(f"row {first + offset}: bad gold answer {row[answer_column]!r}: {judged.detail}")
        elif not written.get("agrees", True):
            got = f"{judged.value} ({judged.status})"
            summary.add_example(f"row {first + offset}: expected {row['expected']!r}, got {got}: {judged.detail}")
        yield written


def _expectation(given: Any, number: int) -> float | str | None:
    """The expected value or status of a row, or None. Tables whose columns have one type hold numbers as text."""
    if given is None or isinstance(given, bool | int | float):
        return given
    if given in STATUSES:
        return str(given)
    try:
        return float({"true": 1, "false": 0}.get(str(given).lower(), given))
    except (TypeError, ValueError):
        raise ValueError(
            f"row {number}: expected {given!r} is neither a value nor a status{nearest(str(given), STATUSES)} "
            f"(statuses: {', '.join(STATUSES)})"
        ) from None


def meets(expected: Any, score: Score) -> bool:
    """True if a score is as expected: a value, ``None`` for no value, or the name of a status."""
    if isinstance(expected, str):
        return expected == score.status
    if expected is None or score.value is None:
        return expected is None and score.value is None
    return abs(float(expected) - score.value) < 1e-9


def print_summary(summary: ScoreSummary, rewards: Sequence[Reward], console: Console) -> None:
    """A table of all rewards, with the share of right answers, and what went wrong below it."""
    table = Table(title=f"{summary.rows} completions", title_justify="left")
    for column in ("reward", "weight", "mean", "statuses"):
        table.add_column(column, justify="right" if column in ("weight", "mean") else "left")
    for reward in rewards:
        values = summary.values[reward.name]
        mean = f"{summary.sums[reward.name] / values:.4f}" if values else "–"
        counts = {status: summary.statuses[reward.name, status] for status in STATUSES}
        shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        table.add_row(f"{reward.name}{' *' if reward.correctness else ''}", f"{reward.weight:g}", mean, shown)
    if summary.valued:
        table.add_row("total", "", f"{summary.total / summary.valued:.4f}", "")
    console.print(table)
    if summary.judged:
        unjudged = f", {summary.rows - summary.judged} could not be judged" if summary.judged < summary.rows else ""
        share = f"{summary.correct / summary.judged:.2%}{unjudged}"
        console.print(f"correct (*): {summary.correct} of {summary.judged} = {share}")
    if summary.expectations:
        met = summary.expectations - summary.disagreements
        console.print(f"expected: {met} of {summary.expectations} agree")
    if summary.bad_golds:
        console.print(f"gold answers that cannot be judged against: {summary.bad_golds}")
    for example in summary.examples:
        console.print(f"  {example}", markup=False, highlight=False)
