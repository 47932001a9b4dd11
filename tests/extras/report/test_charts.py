"""From the columns of ``metrics.csv`` to the curves of a report."""

from typing import Any

import pytest

from grpo_pl.evaluation.curves import Points
from grpo_pl.extras.report import charts as module
from grpo_pl.extras.report.charts import (
    chart,
    charts,
    compared_held_out,
    comparison_charts,
    held_out_charts,
    status_charts,
)

PART: Points = [(1, 0.5)]


def _lines(found: list[dict[str, Any]], what: str = "points") -> dict[str, dict[str, Any]]:
    """Title -> label -> points or intervals."""
    return {each["title"]: {line["label"]: line[what] for line in each["series"]} for each in found}


def test_charts_show_what_was_measured_and_nothing_else() -> None:
    names = [
        *("val/pass@1", "reward", "rewards/math/mean", "kl", "clip_ratio/low_mean", "clip_ratio/region_mean"),
        *("completions/mean_length_wrong", "watch/agreement", "time/update", "time/rollout", "unknown"),
        *("episodes/mean_turns", "episodes/finish/turns", "episodes/invalid_actions", "episodes/return"),
    ]
    shown = {title: list(labels) for title, labels in _lines(charts(dict.fromkeys(names, PART))).items()}
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
    others = ("completions/correct", "entropy", "frac_reward_zero_std", "grad_norm", "lr", "rewards/a/status/ok")
    every = charts(dict.fromkeys([*names, *others], PART))
    assert len(every) == 16 and all(each["unit"] and each["note"] and each["x"] for each in every)


def test_statuses_are_shares_of_what_a_reward_judged_and_none_is_counted_apart() -> None:
    columns: dict[str, Points] = {
        "rewards/math/status/ok": [(1, 6.0), (2, 2.0)],
        "rewards/math/status/bad_gold": [(2, 1.0)],
        "rewards/math/status/unavailable": [(1, 2.0), (2, 1.0)],
        "rewards/form/status/wrong": [(1, 8.0)],
    }
    found = list(status_charts(columns))
    assert [each["kind"] for each in found] == ["stack", "stack", "line"]
    assert _lines(found) == {
        "Statuses: math": {
            "ok": [(1, 0.75), (2, 0.5)],
            "bad gold (not judged)": [(1, 0.0), (2, 0.25)],
            "unavailable (not judged)": [(1, 0.25), (2, 0.25)],
        },
        "Statuses: form": {"wrong": [(1, 1.0)]},
        "Not judged": {"math": [(1, 0.25), (2, 0.5)], "form": [(1, 0.0)]},
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
    found = held_out_charts(columns, [_validation(0, 0.1, 0.3), _validation(4, 0.5, 0.7)])
    bands = _lines(found, "band")
    assert list(bands) == ["Held-out problems", "Held-out: hard", "pass@k"]
    assert bands["Held-out problems"] == {"pass@1": [(0, 0.1, 0.3), (4, 0.5, 0.7)]}
    assert (found[-1]["x"], found[-1]["log"]) == ("k", True)
    assert _lines(found)["pass@k"] == {"rollout 0": [(1, 0.2), (2, 0.3)], "rollout 4": [(1, 0.6), (2, 0.7)]}
    (curve,) = held_out_charts({"val/pass@1": [(0, 0.2)]}, [])  # a run of a version that recorded no validations
    assert curve["series"][0]["band"] == []


def test_the_weighted_sum_keeps_its_line_beside_a_reward_that_is_called_reward() -> None:
    columns: dict[str, Points] = {"val/reward": [(0, 0.5)], "val/rewards/reward": [(0, 0.25)]}
    assert _lines(held_out_charts(columns, [])) == {"Held-out reward": {"sum": [(0, 0.5)], "reward": [(0, 0.25)]}}


def test_a_comparison_has_a_line_for_each_run_that_logged_a_number() -> None:
    runs: dict[str, dict[str, Points]] = {
        "a": {"reward": [(1, 0.1)], "val/pass@1": [(0, 0.2)], "rewards/math/mean": [(1, 0.3)], "step_time": [(1, 2.0)]},
        "b": {"reward": [(1, 0.5)], "val/pass@1": [(0, 0.4)], "kl": [(1, 0.01)]},
    }
    assert _lines(comparison_charts(runs)) == {
        "Reward": {"a": [(1, 0.1)], "b": [(1, 0.5)]},
        "Rewards by name": {"a": [(1, 0.3)]},
        "KL to the reference": {"b": [(1, 0.01)]},
        "Time of a rollout": {"a": [(1, 2.0)]},
    }
    found = _lines(compared_held_out(runs, {"a": [_validation(0, 0.1, 0.3)], "b": []}), "band")
    assert found["Held-out: pass@1"] == {"a": [(0, 0.1, 0.3)], "b": []} and list(found["pass@k"]) == ["a"]


def test_a_long_line_has_the_means_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_POINTS", 3)
    found = chart("t", "n", "u", {"a": [(step, float(step)) for step in range(1, 8)]})
    assert found["series"][0]["points"] == [(2, 2.0), (5, 5.0), (7, 7.0)]
    assert found["note"] == "n; each point is the mean of 3 rollouts"
