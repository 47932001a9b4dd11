"""The loggers of every run: ``metrics.csv``, each row on disk as soon as it is logged, and TensorBoard's files."""

from __future__ import annotations

import csv
import html
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from grpo_pl.files.writing import append_lines, best_effort, staged


class MetricsCSV(Logger):
    """Writes ``metrics.csv``. Lightning's ``CSVLogger`` deletes the file of a resumed run; this one continues it. It
    holds rollouts alone: the steps of a cold start, which are below 0, are left to the other loggers.

    Args:
        path: the file; a row per call of ``log_metrics``, the first columns ``step`` and then names in order of
            appearance. A new name rewrites the file with a longer header, atomically.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, Any]] = []
        self._behind = False
        """True while the file lacks rows that could not be written."""

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run folder holds the whole configuration already."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None and step < 0:
            return
        row = {"step": step, **{name: float(value) for name, value in metrics.items() if name != "epoch"}}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        behind, self._behind = self._behind or bool(new), True
        with best_effort(self.path):
            if behind or not self.path.exists():
                self._rewrite()
            else:
                line = io.StringIO()
                csv.DictWriter(line, self._columns).writerow(row)
                append_lines(self.path, line.getvalue())
            self._behind = False

    @rank_zero_only
    def resume(self, step: int, *, validated_at: int) -> None:
        """Reads what an interrupted run logged and drops what will be logged again.

        Args:
            step: completed rollouts; rows of later ones go.
            validated_at: completed rollouts at the last validation that will not be repeated; later ones go.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        reader, rows = csv.DictReader(lines), []
        self._columns = list(reader.fieldnames or ["step"])
        for row in reader:
            try:
                int(row["step"]), [float(cell) for cell in row.values() if cell != ""]
            except (KeyError, TypeError, ValueError):
                if reader.line_num == len(lines) and not lines[-1].endswith("\n"):
                    break  # its writing was cut short
                raise ValueError(
                    f"{self.path}, line {reader.line_num}: a row has a number, or nothing, for each name of line 1, "
                    f"and a whole one for step, not {lines[reader.line_num - 1]!r:.60}: mend it, or move the file away."
                ) from None
            rows.append({name: value for name, value in row.items() if value != ""})
        self._rows = [row for row in rows if int(row["step"]) <= (validated_at if _held_out(row) else step)]
        self._rewrite()

    def _rewrite(self) -> None:
        with staged(self.path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)


class EventFiles(TensorBoardLogger):
    """TensorBoard's event files in ``folder/tensorboard``. One that cannot be written, as on a full disk, is left as it
    is, and a new one begun beside it as soon as that is possible.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="", version="tensorboard")
        if not isinstance(threading.excepthook, _WithoutWriters):
            threading.excepthook = _WithoutWriters(threading.excepthook)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        with self._best_effort():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        with self._best_effort():
            super().log_hyperparams(*args, **kwargs)

    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int) -> None:
        """A table under TEXT, cells of more than 2,000 characters cut."""
        lines = [columns, ["---"] * len(columns), *data]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        with self._best_effort():
            self.experiment.add_text(key, text, step)

    def save(self) -> None:
        with self._best_effort():
            super().save()

    def finalize(self, status: str) -> None:
        with self._best_effort():
            super().finalize(status)

    @contextmanager
    def _best_effort(self) -> Iterator[None]:
        folder = Path(self.log_dir)
        with best_effort(folder):
            try:
                yield
            except (OSError, ValueError) as error:
                cause = error.__cause__ if isinstance(error, ValueError) else error  # as Lightning wraps it
                if not isinstance(cause, OSError):
                    raise
                self._experiment = None
                for file in folder.glob("events.out.tfevents.*"):
                    if not file.stat().st_size:
                        file.unlink()
                raise cause from None


class _WithoutWriters:
    """Calls ``hook`` for what ends a thread, except an ``OSError`` in a writing thread of TensorBoard: the next call
    that logs raises that one."""

    def __init__(self, hook: Callable[[threading.ExceptHookArgs], Any]) -> None:
        self.hook = hook

    def __call__(self, failed: threading.ExceptHookArgs) -> None:
        module = type(failed.thread).__module__
        if not (module.startswith("tensorboard") and issubclass(failed.exc_type, OSError)):
            self.hook(failed)


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table, in which it is text and nothing else."""
    text = "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= 2000 else text[:2000] + " […]"
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _held_out(row: dict[str, Any]) -> bool:
    return any(name.startswith("val/") for name in row)
