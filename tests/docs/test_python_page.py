"""The training of docs/python.md runs as it is written but for its size, and goes on with parts of one's own."""

import csv
from pathlib import Path

import pytest

from tests.docs.pages import blocks, changed, page, run, section

SMALLER = {"steps=250": "steps=20", "steps=12": "steps=3", "prompts_per_step=16": "prompts_per_step=4", "=50": "=10"}
"""What the page says -> what is run, which shows the same in less time."""


(TRAINING,) = blocks(section(page("python"), "A whole training"), "python")


def _run(changes: dict[str, str], folder: Path) -> str:
    (folder / "script.py").write_text(changed(TRAINING, changes))
    return run("script.py", folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python")


def _rewards(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["reward"]]


def test_a_whole_training_leaves_what_fit_leaves(folder: Path) -> None:
    printed = _run(SMALLER, folder)
    sums = folder / "runs" / "sums"
    assert f"the model is in {Path('runs/sums/export')}" in printed
    files = {"completions.jsonl", "digests.jsonl", "held_out.jsonl", "metrics.csv", "report.html", "run.json"}
    assert {path.name for path in sums.iterdir()} == {".name", "checkpoints", "export", "tensorboard", *files}
    assert len(_rewards(sums)) == 3
    assert (sums / "checkpoints" / "last.ckpt").exists() and (sums / "export" / "grpo_pl.json").is_file()


def test_a_run_that_goes_on_with_parts_of_its_own(folder: Path) -> None:
    """Resumes the run of the test before it with the classes of docs/extending.md, as the page says."""
    parts = blocks(page("extending"), "python", "# my_parts.py")
    changes = SMALLER | {
        'g.open_run("runs", "sums")': 'g.open_run("runs", "sums", resume=True)',
        "weights_only=True": "weights_only=True, ckpt_path=run.checkpoint",
        "steps=12": "steps=5",
        "module = g.GRPOModule(": "".join(parts) + "\nmodule = NothingCut(",
        "beta=0.0": 'beta=0.0, baseline=LeaveOneOutMedian(), scale="none"',
        'accelerator="cpu"': 'accelerator="cpu", callbacks=[LongestAnswer()]',
    }
    _run(changes, folder)
    rows = _rewards(folder / "runs" / "sums")
    assert [int(row["step"]) for row in rows] == [*range(1, 6)]
    assert [bool(row["longest_answer"]) for row in rows] == [False] * 3 + [True] * 2
