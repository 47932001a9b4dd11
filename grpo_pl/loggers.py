"""``MetricsCSV``: one ``metrics.csv`` per run, each row on disk as soon as it is logged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from grpo_pl.checkpoints import write_atomically


class MetricsCSV(Logger):
    """Lightning's ``CSVLogger`` deletes the file of a resumed run; this one goes on where the checkpoint stood.

    Args:
        path: the file; a row per call of ``log_metrics``, the first columns ``step`` and then names in order of
            appearance. A new name rewrites the file with a longer header, atomically.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, Any]] = []

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
        row = {"step": step, **{name: float(value) for name, value in metrics.items() if name != "epoch"}}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new or not self.path.exists():
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    @rank_zero_only
    def resume(self, step: int, *, validated_at: int) -> None:
        """Reads what an interrupted run logged and drops what will be logged again.

        Args:
            step: completed rollouts; rows of later ones go.
            validated_at: completed rollouts at the last validation that will not be repeated; later ones go.
        """
        if not self.path.exists():
            return
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            self._columns = list(reader.fieldnames or ["step"])
            rows = [{name: value for name, value in row.items() if value != ""} for row in reader]
        self._rows = [row for row in rows if int(row["step"]) <= (validated_at if _held_out(row) else step)]
        self._rewrite()

    def _rewrite(self) -> None:
        write_atomically(self.path, self._write)

    def _write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)


def _held_out(row: dict[str, Any]) -> bool:
    return any(name.startswith("val/") for name in row)
