"""From ``metrics.csv`` to the curves of a report."""

from pathlib import Path
from typing import Any

import pytest

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.report.charts import (
    Chart,
    Series,
    charts,
    compared_held_out,
    comparison_charts,
    held_out_charts,
    status_charts,
    thinned,
)


def _file(folder: Path, text: str) -> Path:
    file = folder / "metrics.csv"
    file.write_text(text)
    return file


def test_each_column_keeps_the_rows_it_has(tmp_path: Path) -> None:
    file = _file(tmp_path, "step,val/pass@1,reward,kl\n0,0.25,,\n1,,0.5,0.01\n2,,0.75,\n2,0.5,,\n")
    assert read_curves(file) == {
        "val/pass@1": [(0, 0.25), (2, 0.5)],
        "reward": [(1, 0.5), (2, 0.75)],
        "kl": [(1, 0.01)],
    }


def test_charts_show_what_was_measured_and_nothing_else() -> None:
    names = [
        *("val/pass@1", "reward", "rewards/math/mean", "kl", "clip_ratio/low_mean", "clip_ratio/region_mean"),
        *("completions/mean_length_wrong", "watch/agreement", "time/update", "time/rollout", "unknown"),
        *("episodes/mean_turns", "episodes/finish/turns", "episodes/invalid_actions", "episodes/return"),
    ]
    shown = {chart.title: [series.label for series in chart.series] for chart in charts({n: [(1, 0.5)] for n in names})}
    assert shown == {
        "Reward": ["reward"],
        "Rewards by name": ["math"],
        "Length of completions": ["wrong"],
        "Turns of an episode": ["turns"],
        "Ends of episodes": ["turns", "invalid actions"],
        "KL to the reference": ["KL"],
        "Clipped ratios": ["low"],
        "Watch": ["agree"],
        "Time per rollout": ["rollout", "update"],
    }


def test_every_chart_has_a_unit() -> None:
    every = ["reward", "rewards/a/mean", "completions/correct", "completions/mean_length_wrong", "episodes/mean_turns"]
    every += ["episodes/invalid_actions", "kl", "entropy", "clip_ratio/low_mean", "frac_reward_zero_std", "grad_norm"]
    every += ["lr", "time/rollout", "watch/agreement", "rewards/a/status/ok"]
    found = charts({name: [(1, 0.5)] for name in every})
    assert len(found) == 16 and all(chart.unit and chart.note and chart.x for chart in found)


def test_statuses_are_shares_of_what_a_reward_judged_and_none_is_counted_apart() -> None:
    columns: dict[str, Points] = {
        "rewards/math/status/ok": [(1, 6.0), (2, 2.0)],
        "rewards/math/status/bad_gold": [(2, 1.0)],
        "rewards/math/status/unavailable": [(1, 2.0), (2, 1.0)],
        "rewards/form/status/wrong": [(1, 8.0)],
    }
    math, form, none = status_charts(columns)
    assert {series.label: series.points for series in math.series} == {
        "ok": [(1, 0.75), (2, 0.5)],
        "bad gold (not judged)": [(1, 0.0), (2, 0.25)],
        "unavailable (not judged)": [(1, 0.25), (2, 0.25)],
    }
    assert (math.kind, math.title, form.title) == ("stack", "Statuses: math", "Statuses: form")
    assert {series.label: series.points for series in none.series} == {
        "math": [(1, 0.25), (2, 0.5)],
        "form": [(1, 0.0)],
    }


def _validation(step: int, low: float, high: float) -> dict[str, Any]:
    middle = (low + high) / 2
    return {
        "step": step,
        "metrics": {"val/pass@1": {"value": middle, "low": low, "high": high}},
        "pass_at": {"val": [[1, middle, low, high], [2, high, low, 1.0]]},
        "problems": {},
    }


def test_held_out_curves_have_the_intervals_that_were_measured() -> None:
    columns: dict[str, Points] = {
        "val/pass@1": [(0, 0.2), (4, 0.6)],
        "val/mean_length": [(0, 9.0)],
        "val/hard/greedy": [(4, 0.1)],
    }
    curve, hard, passed = held_out_charts(columns, [_validation(0, 0.1, 0.3), _validation(4, 0.5, 0.7)])
    assert (curve.title, hard.title) == ("Held-out problems", "Held-out: hard")
    assert [(s.label, s.band) for s in curve.series] == [("pass@1", [(0, 0.1, 0.3), (4, 0.5, 0.7)])]
    assert (passed.x, passed.log, [s.label for s in passed.series]) == ("k", True, ["rollout 0", "rollout 4"])
    assert passed.series[1].points == [(1, 0.6), (2, 0.7)]


def test_a_run_without_recorded_validations_has_curves_without_intervals() -> None:
    (curve,) = held_out_charts({"val/pass@1": [(0, 0.2)]}, [])
    assert curve.series[0].band == []


def test_a_comparison_has_a_line_for_each_run_that_logged_a_number() -> None:
    runs: dict[str, dict[str, Points]] = {
        "a": {"reward": [(1, 0.1)], "val/pass@1": [(0, 0.2)], "rewards/math/mean": [(1, 0.3)], "step_time": [(1, 2.0)]},
        "b": {"reward": [(1, 0.5)], "val/pass@1": [(0, 0.4)], "kl": [(1, 0.01)]},
    }
    lines = {chart.title: {s.label: s.points for s in chart.series} for chart in comparison_charts(runs)}
    assert lines == {
        "Reward": {"a": [(1, 0.1)], "b": [(1, 0.5)]},
        "Rewards by name": {"a": [(1, 0.3)]},
        "KL to the reference": {"b": [(1, 0.01)]},
        "Time of a rollout": {"a": [(1, 2.0)]},
    }
    held_out, passed = compared_held_out(runs, {"a": [_validation(0, 0.1, 0.3)], "b": []})
    assert {s.label: s.band for s in held_out.series} == {"a": [(0, 0.1, 0.3)], "b": []}
    assert [s.label for s in passed.series] == ["a"]


def test_a_long_line_has_the_means_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.report.charts.MOST_POINTS", 3)
    points = [(step, float(step)) for step in range(1, 8)]
    chart = thinned(Chart(title="t", note="n", series=[Series(label="a", points=points)], unit="u"))
    assert chart.series[0].points == [(2, 2.0), (5, 5.0), (7, 7.0)]
    assert chart.note == "n; each point is the mean of 3 rollouts" and chart.unit == "u"
