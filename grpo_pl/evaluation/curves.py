"""Reads the columns of a run's ``metrics.csv`` as curves, for the report and for comparisons."""

from __future__ import annotations

import csv
import math
from pathlib import Path

Points = list[tuple[int, float]]
"""(completed rollouts, value) pairs in order; rollouts without a value are left out."""


def read_curves(path: Path) -> dict[str, Points]:
    """The columns of ``metrics.csv`` but ``step``, each with the rows that hold a finite number in it."""
    columns: dict[str, Points] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(float(row["step"]))
            for name, cell in row.items():
                if name not in ("step", None) and cell:
                    value = float(cell)
                    if math.isfinite(value):  # a skipped update logs its loss as NaN: nothing to draw
                        columns.setdefault(name, []).append((step, value))
    return columns
