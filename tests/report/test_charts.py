"""From ``metrics.csv`` to the curves of a report."""

from pathlib import Path

from grpo_pl.evaluation.curves import read_curves
from grpo_pl.report.charts import charts


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
        *("val/pass@1", "val/greedy", "val/mean_length", "val/hard/pass@1", "reward", "rewards/math/mean"),
        *("rewards/math/status/ok", "kl", "clip_ratio/low_mean", "clip_ratio/region_mean"),
        *("completions/mean_length_wrong", "watch/agreement", "time/update", "time/rollout", "unknown"),
        *("episodes/mean_turns", "episodes/finish/turns", "episodes/invalid_actions", "episodes/return"),
    ]
    shown = {chart.title: [series.label for series in chart.series] for chart in charts({n: [(1, 0.5)] for n in names})}
    assert shown == {
        "Held-out problems": ["pass@1", "greedy"],
        "Held-out: hard": ["pass@1"],
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


def test_shares_are_drawn_from_0_to_1_and_stages_of_time_on_top_of_each_other() -> None:
    by_title = {c.title: c for c in charts({"val/pass@1": [(1, 0.5)], "time/rollout": [(1, 2.0)]})}
    assert by_title["Held-out problems"].unit == "share"
    assert by_title["Time per rollout"].kind == "stack"
    assert by_title["Time per rollout"].series[0].points == [(1, 2.0)]
