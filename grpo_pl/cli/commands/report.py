"""``grpo-pl report``: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

from grpo_pl.files.runs import RunFolder
from grpo_pl.report.page import write_report


def report(run: Path) -> None:
    """Writes ``report.html`` into the folder of a run, also of one that has not ended: its curves and samples.

    Args:
        run: the run's folder, such as runs/quickstart.
    """
    print(write_report(RunFolder(run)))
