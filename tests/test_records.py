"""Figures of a run of single turns, as they were before rows could hold more than what the policy wrote."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RECORD = HERE / "records" / "single_turn_metrics.csv"
FLAGS = [
    f"--config={HERE / 'faults' / 'tiny.yaml'}",
    f"--config={HERE.parent / 'configs' / 'algorithm' / 'grpo.yaml'}",
    "--model.algorithm.num_iterations=2",
    "--model.algorithm.num_minibatches=2",
    "--model.algorithm.terms.top_entropy=grpo_pl.objective.terms.top_entropy.TopEntropyTokens",
    "--model.algorithm.terms.top_entropy.init_args.quantile=0.5",
    "--model.algorithm.entropy_coef=0.01",
]


def test_a_run_of_single_turns_has_the_figures_on_record(
    command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]]
) -> None:
    """Clipping, KL, entropies and their mask over six rollouts; on the machine of the record they are equal bit for
    bit."""
    assert command_line("fit", *FLAGS).status == 0
    ours = read_metrics(command_line.runs / "tiny" / "metrics.csv")
    with RECORD.open(newline="") as lines:
        recorded = [{key: value for key, value in row.items() if value} for row in csv.DictReader(lines)]
    assert [row.keys() for row in ours] == [row.keys() for row in recorded]
    for mine, theirs in zip(ours, recorded, strict=True):
        for key, value in theirs.items():
            assert float(mine[key]) == pytest.approx(float(value), rel=1e-3, abs=1e-6), key
