"""``benchmarks/gsm_trials.py``: what its demonstrations ask the calculator."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_each_calculation_of_a_worked_answer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    worked = "There are 3*4=12 red ones.\nOf 30 - 12 = 18 half, $18/2=$9, are left, 115 boys = 115.\n#### 9"
    assert importlib.import_module("gsm_trials").with_calls(worked) == [
        "There are 3*4=<calc>3*4</calc>",
        " red ones.\nOf 30 - 12=<calc>30 - 12</calc>",
        " half, $18/2=<calc>18/2</calc>",
        ", are left, 115 boys = 115.\n#### 9",
    ]
