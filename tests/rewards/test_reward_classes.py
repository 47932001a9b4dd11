"""Classes of texts that rewards once paid, refused or fell over wrongly, judged through the command line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from grpo_pl.cli.main import main

DATA = Path(__file__).parent / "data"


def test_the_classes_are_judged_as_expected_by_the_command_line(tmp_path: Path) -> None:
    """``grpo-pl score`` exits 1 on the first expectation that is not met."""
    rows = [json.loads(line) for line in (DATA / "reward_classes.jsonl").read_text().splitlines()]
    assert len({row["class"] for row in rows}) == 7
    command = ["score", str(DATA / "reward_classes.jsonl"), "--config", str(DATA / "reward_classes.yaml")]
    assert main([*command, "--output", str(tmp_path / "scores.jsonl")]) == 0
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == len(rows) > 150
