"""Commands whose output nobody reads to its end, as behind ``| head``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_pl.cli.main import UNREAD

ROOT = Path(__file__).parents[2]


def _unread(*arguments: str, folder: Path, unbuffered: bool = False) -> tuple[int, str]:
    """Exit status and errors of a command whose output is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "grpo_pl", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1" if unbuffered else ""},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", ["--help", "--version", "fit --help", "fit --help terms"])
@pytest.mark.parametrize("unbuffered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_page_that_nobody_reads_ends_silently(tmp_path: Path, arguments: str, unbuffered: bool) -> None:
    assert _unread(*arguments.split(), folder=tmp_path, unbuffered=unbuffered) == (UNREAD, "")


def test_nor_is_it_told_where_each_line_is_written_at_once(tmp_path: Path) -> None:
    assert _unread("fit", "--help", folder=tmp_path, unbuffered=True) == (UNREAD, "")


def test_scores_are_written_though_nobody_reads_the_table(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"completion": "5", "answer": "5"}) + "\n")
    (tmp_path / "task.yaml").write_text("rewards: [{class_path: grpo_pl.rewards.ExactReward}]\n")
    status, errors = _unread("score", "rows.jsonl", "--config", "task.yaml", folder=tmp_path)
    assert status == UNREAD and "Error" not in errors and "error" not in errors
    assert "scores" in json.loads((tmp_path / "rows.scores.jsonl").read_text())


def test_a_mistake_is_told_though_nobody_reads_the_output(tmp_path: Path) -> None:
    status, errors = _unread("score", "rows.jsonl", "--config", "nothing.yaml", folder=tmp_path)
    assert status not in (0, UNREAD) and "nothing.yaml" in errors
