"""``grpo-pl report``: a run as one HTML file, or several runs in the same charts."""

from __future__ import annotations

from pathlib import Path

from grpo_pl.extras.report.page import write_comparison, write_report
from grpo_pl.files.runs import RunFolder


def report(runs: list[Path], output: Path | None = None) -> None:
    """Writes ``report.html`` into the folder of a run, also of one that has not ended: its curves and samples. Of
    several runs it writes one page with a line for each run in every chart, what they answered, and the settings in
    which they differ.

    Args:
        runs: the run's folder, such as runs/quickstart; or several.
        output: file for the comparison of several runs; comparison.html in the folder of the first run's folder by
            default.
    """
    folders = [RunFolder(run) for run in runs]
    if len(folders) > 1:
        print(write_comparison(folders, output or folders[0].path.parent / "comparison.html"))
    elif output is not None:
        raise ValueError("--output is for several runs: the report of one stands in its folder.")
    else:
        print(write_report(folders[0]))
