"""Worked answers that fit together and others, by hand."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("worked", "fault"),
    [
        ("He has 2*3 = <<2*3=6>>6 and 6+1 = <<6+1=7>>7.\n#### 7", ""),
        ("It is <<1,000*2=2000>>2,000 dollars.\n#### 2000", ""),
        ("First <<30/3=10>>10, of which 50% are 5\n#### 5", ""),  # the last number is not that of a calculation
        ("It is 20 together.\n#### 20", ""),
        ("That makes <<5/0.14285714285714285=35>>35.\n#### 35", ""),  # rounded
        ("She has $<<35-65/2=5/2>>5/2 left over.\n#### 5/2", ""),
        ("58% of 50 are <<58/100*50=28>>28.\n#### 28", "58/100*50 is not 28"),
        ("It is <<2+2=4>>4.\n#### 5", "the working ends with 4 and 4, the answer is 5"),
    ],
)
def test_a_disagreement_is_named(worked: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    assert importlib.import_module("gsm_templates").disagreement(worked) == fault
