"""The figures that docs/algorithms.md quotes come out of its script."""

import csv
import sys

import pytest

from tests.docs.pages import ROOT, loaded

biases = loaded(ROOT / "docs" / "plots" / "biases.py")


def test_a_token_of_10_weighs_ten_times_one_of_100_under_the_sequence_mean():
    table, ten, hundred = biases.token_weights_by_length(), biases.LENGTHS.index(10), biases.LENGTHS.index(100)
    ratios = {name: weights[ten] / weights[hundred] for name, weights in table.items()}
    assert ratios == pytest.approx({"sequence_mean": 10, "token_mean": 1, "constant": 1})


def test_only_the_group_std_weighs_questions_by_difficulty():
    table = biases.question_weights_by_pass_rate(samples=16_000, seed=1)
    hard, middle = biases.PASS_RATES.index(0.05), biases.PASS_RATES.index(0.5)
    assert table["grpo, group of 64"][hard] / table["grpo, group of 64"][middle] > 2
    assert table["grpo, group of 8"][hard] / table["grpo, group of 8"][middle] > 1.2
    for name, level in (("rloo, group of 8", 1.0), ("dr_grpo, group of 8", 7 / 8)):
        assert table[name] == pytest.approx([level] * len(biases.PASS_RATES), rel=0.08)


@pytest.mark.slow
def test_plots_are_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(sys, "argv", ["biases.py", "--out", str(tmp_path), "--samples", "640"])
    biases.main()
    for name in ("length_bias", "difficulty_bias"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / f"{name}.csv").open() as file:
            assert len(list(csv.reader(file))) > 5
