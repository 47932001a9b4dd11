"""Selects the curves of ``metrics.csv`` that a report shows, and groups them in charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_pl.evaluation.curves import Points


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    points: Points


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart with one or more lines."""

    title: str
    note: str
    """Subtitle: what the numbers mean."""
    series: Sequence[Series]
    kind: Literal["line", "stack"] = "line"
    unit: Literal["", "share", "s"] = ""
    """``share`` is drawn from 0 to 1; ``s`` are seconds."""
    smooth: bool = True
    """Also draw a running mean, because single rollouts are noisy."""


def charts(columns: Mapping[str, Points]) -> list[Chart]:
    """The charts of a report, in order; charts without any data are left out."""
    rewards = {name: name.split("/")[1] for name in columns if name.startswith("rewards/") and name.endswith("/mean")}
    times = {name: name.removeprefix("time/") for name in columns if name.startswith("time/")}
    clipped = {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high"}
    stages = ["rollout", "reward", "logprobs", "backward", "optimizer", "update"]
    ordered = dict(sorted(times.items(), key=lambda item: (*[item[1] != stage for stage in stages], item[1])))
    wanted = [
        *_held_out(columns),
        _chart(columns, "Reward", "mean over a rollout, weighted sum", {"reward": "reward"}),
        _chart(columns, "Rewards by name", "mean of each, before its weight", rewards),
        _chart(
            columns,
            "Right completions in training",
            "share of a rollout's completions; held-out problems stand above",
            {"completions/correct": "right"},
            unit="share",
        ),
        _chart(
            columns,
            "Length of completions",
            "tokens, right and wrong answers apart",
            {"completions/mean_length_correct": "correct", "completions/mean_length_wrong": "wrong"},
        ),
        _chart(columns, "Turns of an episode", "mean of a rollout", {"episodes/mean_turns": "turns"}),
        _chart(
            columns,
            "Ends of episodes",
            "share that the environment ended, or a limit on turns or tokens; share of actions that meant nothing",
            {
                "episodes/finish/environment": "environment",
                "episodes/finish/turns": "turns",
                "episodes/finish/tokens": "tokens",
                "episodes/invalid_actions": "invalid actions",
            },
            unit="share",
        ),
        _chart(columns, "KL to the reference", "per token", {"kl": "KL"}),
        _chart(columns, "Entropy", "of the policy, nats per token", {"entropy": "entropy"}),
        _chart(columns, "Clipped ratios", "share of tokens", clipped),
        _chart(
            columns,
            "Groups and endings",
            "share without a difference in reward; cut off at the limit; with a word of reflection",
            {
                "frac_reward_zero_std": "equal rewards",
                "completions/clipped_ratio": "cut off",
                "completions/reflection_rate": "reflecting",
            },
            unit="share",
        ),
        _chart(
            columns,
            "Watch",
            "share of rewarded completions that a judge refuses; of all, where both agree, and of a form that is new",
            {
                "watch/rewarded_but_strict_wrong": "strict refuses",
                "watch/rewarded_but_lenient_wrong": "lenient refuses",
                "watch/agreement": "agree",
                "watch/form_drift": "new form",
            },
            unit="share",
        ),
        _chart(columns, "Gradient norm", "before clipping", {"grad_norm": "norm"}),
        _chart(columns, "Learning rate", "", {"lr": "rate"}, smooth=False),
        _chart(columns, "Time per rollout", "seconds by stage", ordered, kind="stack", unit="s", smooth=False),
    ]
    return [chart for chart in wanted if chart.series]


def _held_out(columns: Mapping[str, Points]) -> Iterable[Chart]:
    """One chart for ``val/…`` and one for each named set ``val/<name>/…``."""
    sets = dict.fromkeys(name.rpartition("/")[0] for name in columns if name.startswith("val/"))
    for place in sets:
        names = {}
        for name in columns:
            leaf = name.removeprefix(f"{place}/")
            if name.rpartition("/")[0] == place and leaf.startswith(("pass@", "maj@", "greedy", "avg@")):
                names[name] = leaf
        title = "Held-out problems" if place == "val" else f"Held-out: {place.removeprefix('val/')}"
        yield _chart(columns, title, "share answered correctly", names, unit="share", smooth=False)


def _chart(columns: Mapping[str, Points], title: str, note: str, names: Mapping[str, str], **options: Any) -> Chart:
    series = [Series(label=label, points=columns[name]) for name, label in names.items() if name in columns]
    return Chart(title=title, note=note, series=series, **options)
