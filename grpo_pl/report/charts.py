"""Selects what a report draws from ``metrics.csv``: charts of one run, or of several runs side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from grpo_pl.evaluation.curves import Points
from grpo_pl.rewards.base import Status

MOST_POINTS = 1000
"""Most points of a line; of a longer one each point is the mean of as many neighbours as that takes."""
WITHOUT_VALUE = ("bad_gold", "unavailable")
"""Statuses of scores without a value: the completion is not to blame."""
SHARES = ("pass@", "maj@", "greedy", "avg@")
"""Beginnings of the names of held-out metrics that are shares."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    points: Points
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): an interval around points."""
    color: str | None = None
    """``good``, ``bad`` or ``none`` for verdicts; otherwise by the place in the chart."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart with one or more lines."""

    title: str
    note: str
    """Subtitle: what the numbers mean."""
    series: Sequence[Series]
    kind: Literal["line", "stack"] = "line"
    unit: str = ""
    """Of the numbers; ``share`` is drawn from 0 to 1."""
    x: str = "rollout"
    """Unit of the other axis."""
    log: bool = False
    """That axis doubles from mark to mark."""
    smooth: bool = True
    """Also draw a running mean, because single rollouts are noisy."""


@dataclass(frozen=True)
class Lines:
    """A chart of one run: its lines by the columns of ``metrics.csv``."""

    title: str
    note: str
    unit: str
    columns: Mapping[str, str]
    """Column -> label of its line."""
    smooth: bool = True
    kind: Literal["line", "stack"] = "line"

    def chart(self, series: Sequence[Series], title: str | None = None) -> Chart:
        """The chart with these lines."""
        return Chart(
            title=title or self.title, note=self.note, series=series, unit=self.unit, smooth=self.smooth, kind=self.kind
        )


def charts(columns: Mapping[str, Points]) -> list[Chart]:
    """The charts of one run's training, in order; charts without any data are left out."""
    times = {name: name.removeprefix("time/") for name in columns if name.startswith("time/")}
    stages = ["rollout", "reward", "logprobs", "backward", "optimizer", "update"]
    ordered = dict(sorted(times.items(), key=lambda item: (*[item[1] != stage for stage in stages], item[1])))
    time = Lines(
        "Time per rollout",
        "by stage; what is far above most is cut off",
        "seconds",
        ordered,
        smooth=False,
        kind="stack",
    )
    found = []
    for lines in [*_training_lines(columns), time]:
        present = {name: label for name, label in lines.columns.items() if name in columns}
        found.append(lines.chart([Series(label=label, points=columns[name]) for name, label in present.items()]))
    return [thinned(chart) for chart in [*found, *status_charts(columns)] if chart.series]


def _training_lines(names: Collection[str]) -> list[Lines]:
    """The charts of training, for a run with columns of these names."""
    rewards = {name: name.split("/")[1] for name in names if name.startswith("rewards/") and name.endswith("/mean")}
    lengths = {"completions/mean_length_correct": "right", "completions/mean_length_wrong": "wrong"}
    apart = "right and wrong answers apart"
    if not lengths.keys() & set(names):
        lengths, apart = {"completions/mean_length": "all"}, "mean over a rollout"
    ends = {
        "episodes/finish/environment": "environment",
        "episodes/finish/turns": "turns",
        "episodes/finish/tokens": "tokens",
        "episodes/invalid_actions": "invalid actions",
    }
    groups = {
        "frac_reward_zero_std": "equal rewards",
        "completions/clipped_ratio": "cut off",
        "completions/reflection_rate": "reflecting",
    }
    watch = {
        "watch/rewarded_but_strict_wrong": "strict refuses",
        "watch/rewarded_but_lenient_wrong": "lenient refuses",
        "watch/agreement": "agree",
        "watch/form_drift": "new form",
    }
    clipped = {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high"}
    told = "groups without a difference in reward; completions cut off at the limit; with a word of reflection"
    judged = "rewarded completions that a judge refuses; of all, where both agree, and of a form that is new"
    ended = "that the environment ended, or a limit on turns or tokens; actions that meant nothing"
    right = "of a rollout's completions; held-out problems stand above"
    return [
        Lines("Reward", "weighted sum, mean over a rollout", "reward", {"reward": "reward"}),
        Lines("Rewards by name", "mean of each, before its weight", "reward", rewards),
        Lines("Right completions in training", right, "share", {"completions/correct": "right"}),
        Lines("Length of completions", apart, "tokens", lengths),
        Lines("Turns of an episode", "mean of a rollout", "turns", {"episodes/mean_turns": "turns"}),
        Lines("Ends of episodes", ended, "share", ends),
        Lines("KL to the reference", "mean per token", "nats", {"kl": "KL"}),
        Lines("Entropy", "of the policy, mean per token", "nats", {"entropy": "entropy"}),
        Lines("Clipped ratios", "tokens whose ratio left the trust region", "share of tokens", clipped),
        Lines("Groups and endings", told, "share", groups),
        Lines("Watch", judged, "share", watch),
        Lines("Gradient norm", "before clipping", "L2 norm", {"grad_norm": "norm"}),
        Lines("Learning rate", "of the optimiser", "per step", {"lr": "rate"}, smooth=False),
    ]


def status_charts(columns: Mapping[str, Points]) -> Iterable[Chart]:
    """For each reward the share of each of its statuses, and for all of them the share that it could not judge."""
    rewards = dict.fromkeys(
        name.split("/")[1] for name in columns if name.startswith("rewards/") and "/status/" in name
    )
    missing = []
    for reward in rewards:
        counts = {status: dict(columns.get(f"rewards/{reward}/status/{status}", [])) for status in get_args(Status)}
        totals: dict[int, float] = {}
        for of in counts.values():
            for step, count in of.items():
                totals[step] = totals.get(step, 0.0) + count
        steps = sorted(totals)
        shares = {s: [(step, of.get(step, 0.0) / totals[step]) for step in steps] for s, of in counts.items() if of}
        none = [(step, sum(counts[s].get(step, 0.0) for s in WITHOUT_VALUE) / totals[step]) for step in steps]
        missing.append(Series(label=reward, points=none))
        yield Chart(
            title=f"Statuses: {reward}",
            note="what became of the completions; those that it could not judge are left out of the loss",
            series=[
                Series(
                    label=f"{status.replace('_', ' ')}{' (not judged)' if status in WITHOUT_VALUE else ''}",
                    points=points,
                )
                for status, points in shares.items()
            ],
            kind="stack",
            unit="share",
            smooth=False,
        )
    yield Chart(
        title="Not judged",
        note="completions that a reward could not judge for no fault of theirs",
        series=missing,
        unit="share",
    )


def held_out_charts(columns: Mapping[str, Points], validations: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """One chart for ``val/…`` and one for each named set ``val/<name>/…``, and their pass@k before and after.

    Args:
        validations: rows of ``held_out.jsonl``, from which intervals come; none in a run of an older version.
    """
    found = []
    for place in dict.fromkeys(name.rpartition("/")[0] for name in columns if name.startswith("val/")):
        leaves = {name: name.rpartition("/")[2] for name in columns if name.rpartition("/")[0] == place}
        shares = {name: leaf for name, leaf in leaves.items() if leaf.startswith(SHARES)}
        title = "Held-out problems" if place == "val" else f"Held-out: {place.removeprefix('val/')}"
        found.append(_held_out_chart(title, "answered correctly", "share", shares, columns, validations))
    for summed in [name for name in columns if name.startswith("val/") and name.endswith("/reward")]:
        place = summed.removesuffix("/reward")  # of a run without a correctness reward
        below = f"{place}/rewards/"
        rewards = {name: name.removeprefix(below) for name in columns if name.startswith(below)}
        title = "Held-out reward" if place == "val" else f"Held-out reward: {place.removeprefix('val/')}"
        note = "weighted sum and each reward, mean over problems"
        found.append(_held_out_chart(title, note, "reward", {summed: "reward", **rewards}, columns, validations))
    for place in dict.fromkeys(place for row in validations for place in row["pass_at"]):
        ends = {f"rollout {row['step']}": row for row in (validations[0], validations[-1])}
        found.append(pass_chart(place, ends))
    return [thinned(chart) for chart in found if chart.series]


def _held_out_chart(
    title: str,
    note: str,
    unit: str,
    labels: Mapping[str, str],
    columns: Mapping[str, Points],
    validations: Sequence[Mapping[str, Any]],
) -> Chart:
    series = [
        Series(label=label, points=columns[name], band=interval(validations, name)) for name, label in labels.items()
    ]
    return Chart(title=title, note=note, series=series, unit=unit, smooth=False)


def interval(validations: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float, float]]:
    """(rollouts, low, high) of one held-out metric."""
    measured = [(row["step"], row["metrics"].get(name)) for row in validations]
    return [(step, found["low"], found["high"]) for step, found in measured if found is not None]


def pass_chart(place: str, rows: Mapping[str, Mapping[str, Any]]) -> Chart:
    """pass@k over k in one group of problems, a line for each of some validations."""
    lines = {label: row["pass_at"].get(place, []) for label, row in rows.items()}
    return Chart(
        title="pass@k" if place == "val" else f"pass@k: {place.removeprefix('val/')}",
        note="probability that one of k samples is right, mean over problems",
        series=[
            Series(label=label, points=[(k, v) for k, v, *_ in line], band=[(k, a, b) for k, _, a, b in line])
            for label, line in lines.items()
            if line
        ],
        unit="share",
        x="k",
        log=True,
        smooth=False,
    )


def comparison_charts(runs: Mapping[str, Mapping[str, Points]]) -> list[Chart]:
    """A chart for each number of training, with a line for each run that logged it."""
    every = dict.fromkeys(name for columns in runs.values() for name in columns)
    found = []
    seconds = Lines("Time of a rollout", "without validation", "seconds", {"step_time": "s"})
    for lines in [*_training_lines(every), seconds]:
        for name, label in lines.columns.items():
            series = [Series(label=run, points=columns[name]) for run, columns in runs.items() if name in columns]
            if series:
                title = lines.title if len(lines.columns) == 1 else f"{lines.title}: {label}"
                found.append(thinned(lines.chart(series, title)))
    return found


def compared_held_out(
    runs: Mapping[str, Mapping[str, Points]], validations: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Chart]:
    """A chart for each held-out share, with a line and its interval for each run, and pass@k after training."""
    every = dict.fromkeys(name for columns in runs.values() for name in columns if name.startswith("val/"))
    found = [
        Chart(
            title=f"Held-out: {name.removeprefix('val/')}",
            note="mean over problems" if name.startswith("val/reward") else "answered correctly",
            series=[
                Series(label=run, points=columns[name], band=interval(validations[run], name))
                for run, columns in runs.items()
                if name in columns
            ],
            unit="reward" if name.startswith("val/reward") else "share",
            smooth=False,
        )
        for name in every
        if name.rpartition("/")[2].startswith(SHARES) or name == "val/reward" or name.startswith("val/rewards/")
    ]
    last = {run: rows[-1] for run, rows in validations.items() if rows}
    found += [pass_chart(place, last) for place in dict.fromkeys(p for row in last.values() for p in row["pass_at"])]
    return [thinned(chart) for chart in found if chart.series]


def thinned(chart: Chart) -> Chart:
    """The chart with at most ``MOST_POINTS`` points a line, numbers to six digits."""
    size = -(-max((len(one.points) for one in chart.series), default=0) // MOST_POINTS)
    series = [
        Series(
            label=one.label,
            points=[_mean(one.points[i : i + size]) for i in range(0, len(one.points), size)],
            band=[(x, short(low), short(high)) for x, low, high in one.band],
            color=one.color,
        )
        for one in chart.series
    ]
    note = f"{chart.note}; each point is the mean of {size} rollouts" if size > 1 else chart.note
    return Chart(**{**vars(chart), "series": series, "note": note})


def _mean(points: Points) -> tuple[int, float]:
    return points[len(points) // 2][0], short(fmean(value for _, value in points))


def short(value: float) -> float:
    """The number to nine digits, as exact as float32."""
    return float(f"{value:.9g}")
