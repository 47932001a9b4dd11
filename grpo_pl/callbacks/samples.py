"""``SampleTable``: every so many rollouts a few groups of completions, in the terminal and in loggers with tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_pl.callbacks.completions import completion_rows, exchange_text, flat_row, shortened
from grpo_pl.environment import text_of
from grpo_pl.files.rows import Row
from grpo_pl.functional.argument_checks import check_at_least


class SampleTable(Callback):
    """Shows completions of one rollout beside what they got. Loggers with tables get all completions of those groups:
    TensorBoard's files of the run, ``WandbLogger``, ``MLFlowLogger`` and any other with a method
    ``log_table(key, columns, data, step)``.

    Args:
        every_n_rollouts: rollouts between two tables; 0 shows none.
        groups: prompts a table.
        completions: different completions of each prompt that the terminal shows, the best and the worst first.
        characters: longest text of a completion in the terminal; the middle of longer ones is left out.
    """

    def __init__(
        self, every_n_rollouts: int = 20, groups: int = 2, completions: int = 3, characters: int = 300
    ) -> None:
        super().__init__()
        check_at_least(0, "samples", every_n_rollouts=every_n_rollouts, groups=groups)
        check_at_least(1, "samples", completions=completions, characters=characters)
        self.every_n_rollouts, self.groups = every_n_rollouts, groups
        self.completions, self.characters = completions, characters

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        experience = outputs["experience"]
        number = experience.samples.step + 1
        if not self.every_n_rollouts or number % self.every_n_rollouts or not trainer.is_global_zero:
            return
        rows = completion_rows(experience, groups=self.groups)
        if not rows:
            return
        table = sample_table(rows, number, completions=self.completions, characters=self.characters)
        (trainer.progress_bar_callback or Console(stderr=True)).print(table)
        for logger in trainer.loggers:
            log_table(logger, "completions", [flat_row(row) for row in rows], number)


def sample_table(rows: Sequence[Row], number: int, *, completions: int, characters: int) -> Table:
    """A table of one rollout's groups, in each the completions of highest, lowest, second highest … reward."""
    table = Table(title=f"samples of rollout {number}", title_justify="left", show_lines=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=5, overflow="fold")
    for heading in ("reward", "advantage"):
        table.add_column(heading, justify="right", no_wrap=True)
    for prompt_id in dict.fromkeys(row["prompt_id"] for row in rows):
        group = [row for row in rows if row["prompt_id"] == prompt_id]
        different = {_written(row): row for row in reversed(group)}  # of equal ones the first
        for place, row in enumerate(_ends_first(list(different.values())[::-1])[:completions]):
            question = _asked(row, characters) if place == 0 else ""
            style = {True: "green", False: "red", None: ""}[row["correct"]]
            table.add_row(
                Text(question),  # Text: brackets of a completion are no markup
                Text(shortened(_written(row).strip(), characters)),
                Text(_number(row["reward"]), style=style),
                Text(_number(row["advantage"], sign="+")),
            )
    return table


def _asked(row: Row, characters: int) -> str:
    """The question and its gold answer; of an episode what the policy read first, and the answer if there is one."""
    answer = f"= {row['answer']}"
    if "episode" not in row:
        return f"{shortened(row['question'].strip(), characters)}\n{answer}"
    parts = [row["question"], text_of(row["episode"]["observation"]), answer if row["answer"] else ""]
    return "\n".join(shortened(part.strip(), characters) for part in parts if part.strip())


def _written(row: Row) -> str:
    """A completion, or an episode turn by turn."""
    return exchange_text(row["episode"]) if "episode" in row else str(row["completion"])


def log_table(logger: Logger, key: str, rows: Sequence[Row], step: int) -> None:
    """Hands rows to a logger that has tables, under a name of theirs; does nothing with one that has none."""
    columns = list(rows[0])
    if isinstance(logger, MLFlowLogger):
        data = {column: [row[column] for row in rows] for column in columns}
        logger.experiment.log_table(logger.run_id, data, artifact_file=f"{key}/{step:06d}.json")
    elif hasattr(logger, "log_table"):
        logger.log_table(key, columns=columns, data=[list(row.values()) for row in rows], step=step)


def _ends_first(group: Sequence[Row]) -> list[Row]:
    """Highest, lowest, second highest, second lowest … reward; a reward that is missing counts as lowest."""
    ordered = sorted(group, key=lambda row: -1e30 if row["reward"] is None else row["reward"], reverse=True)
    return [ordered[i // 2] if i % 2 == 0 else ordered[-1 - i // 2] for i in range(len(ordered))]


def _number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.2f}"
