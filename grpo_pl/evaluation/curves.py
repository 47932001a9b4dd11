"""Reads the columns of a run's ``metrics.csv`` as curves, for the report and for comparisons."""

from __future__ import annotations

import csv
import math
from pathlib import Path

Points = list[tuple[int, float]]
"""(completed rollouts, value) pairs in order; rollouts without a value are left out."""


def read_curves(path: Path) -> dict[str, Points]:
    """The columns of ``metrics.csv`` but ``step``, each with the rows that hold a finite number in it.

    Raises:
        ValueError: the file is none of a run, with its name and the line.
    """
    columns: dict[str, Points] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            if "step" not in (rows.fieldnames or ()):
                raise ValueError("there is no column `step`")
            for row in rows:
                step = int(float(row["step"]))
                for name, cell in row.items():
                    if name not in ("step", None) and cell:
                        value = float(cell)
                        if math.isfinite(value):  # a skipped update logs its loss as NaN: nothing to draw
                            columns.setdefault(name, []).append((step, value))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {rows.line_num} of '{path}' is not of a run's metrics: {error}.") from error
    return columns
