"""Selects what a report draws from ``metrics.csv``: charts of one run, or of several runs side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from grpo_pl.evaluation.curves import Points
from grpo_pl.rewards.base import Status

MOST_POINTS = 1000
"""Most points of a line; of a longer one each point is the mean of as many neighbours as that takes."""
WITHOUT_VALUE = ("bad_gold", "unavailable")
"""Statuses of scores without a value: the completion is not to blame."""
SHARES = ("pass@", "maj@", "greedy", "avg@")
"""Beginnings of the names of held-out metrics that are shares."""
STAGES = ("rollout", "reward", "logprobs", "backward", "optimizer", "update")

Chart = dict[str, Any]
"""What the page draws, see `chart`."""
Band = Sequence[tuple[float, float, float]]
"""(x, low, high): an interval around points."""
Runs = Mapping[str, Mapping[str, Points]]
"""Name of a run -> its columns."""
Validations = Sequence[Mapping[str, Any]]
"""Rows of ``held_out.jsonl``, from which intervals come; none in a run of an older version."""


def chart(
    title: str,
    note: str,
    unit: str,
    lines: Mapping[str, Points],
    *,
    bands: Mapping[str, Band] | None = None,
    kind: Literal["line", "stack"] = "line",
    x: str = "rollout",
    log: bool = False,
    smooth: bool = False,
) -> Chart:
    """A chart with at most ``MOST_POINTS`` points a line, numbers to nine digits.

    Args:
        note: subtitle: what the numbers mean.
        unit: of the numbers; ``share`` is drawn from 0 to 1.
        lines: by their labels.
        x: unit of the other axis; with ``log`` it doubles from mark to mark.
        smooth: also draw a running mean, because single rollouts are noisy.
    """
    size = -(-max(map(len, lines.values()), default=0) // MOST_POINTS)
    series = [
        {
            "label": label,
            "points": [_mean(points[i : i + size]) for i in range(0, len(points), size)],
            "band": [(at, short(low), short(high)) for at, low, high in (bands or {}).get(label, ())],
        }
        for label, points in lines.items()
    ]
    note += f"; each point is the mean of {size} {x}s" if size > 1 else ""
    drawn = {"title": title, "note": note, "unit": unit, "series": series}
    return drawn | {"kind": kind, "x": x, "log": log, "smooth": smooth}


def _mean(points: Points) -> tuple[int, float]:
    return points[len(points) // 2][0], short(fmean(value for _, value in points))


def short(value: float) -> float:
    """The number to nine digits, as exact as float32."""
    return float(f"{value:.9g}")


def _with_lines(found: Iterable[Chart]) -> list[Chart]:
    return [each for each in found if each["series"]]


# --- training -------------------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Columns of ``metrics.csv`` that belong together."""

    title: str
    note: str
    unit: str
    labels: Mapping[str, str]
    """Column -> label of its line."""
    smooth: bool = True


def _training(names: Collection[str]) -> list[Numbers]:
    """What is drawn of training, for a run with columns of these names."""
    rewards = {name: name.split("/")[1] for name in names if name.startswith("rewards/") and name.endswith("/mean")}
    lengths = {"completions/mean_length_correct": "right", "completions/mean_length_wrong": "wrong"}
    apart = "right and wrong answers apart"
    if not lengths.keys() & set(names):
        lengths, apart = {"completions/mean_length": "all"}, "mean over a rollout"
    ends = {f"episodes/finish/{end}": end for end in ("environment", "turns", "tokens")}
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
        Numbers("Reward", "weighted sum, mean over a rollout", "reward", {"reward": "reward"}),
        Numbers("Rewards by name", "mean of each, before its weight", "reward", rewards),
        Numbers("Right completions in training", right, "share", {"completions/correct": "right"}),
        Numbers("Length of completions", apart, "tokens", lengths),
        Numbers("Turns of an episode", "mean of a rollout", "turns", {"episodes/mean_turns": "turns"}),
        Numbers("Ends of episodes", ended, "share", {**ends, "episodes/invalid_actions": "invalid actions"}),
        Numbers("KL to the reference", "mean per token", "nats", {"kl": "KL"}),
        Numbers("Entropy", "of the policy, mean per token", "nats", {"entropy": "entropy"}),
        Numbers("Clipped ratios", "tokens whose ratio left the trust region", "share of tokens", clipped),
        Numbers("Groups and endings", told, "share", groups),
        Numbers("Watch", judged, "share", watch),
        Numbers("Gradient norm", "before clipping", "L2 norm", {"grad_norm": "norm"}),
        Numbers("Learning rate", "of the optimiser", "per step", {"lr": "rate"}, smooth=False),
    ]


def charts(columns: Mapping[str, Points]) -> list[Chart]:
    """The charts of one run's training, in order; charts without any data are left out."""
    found = []
    for title, note, unit, labels, smooth in _training(columns):
        lines = {label: columns[name] for name, label in labels.items() if name in columns}
        found.append(chart(title, note, unit, lines, smooth=smooth))
    times = {name.removeprefix("time/"): points for name, points in columns.items() if name.startswith("time/")}
    ordered = dict(sorted(times.items(), key=lambda item: (*[item[0] != stage for stage in STAGES], item[0])))
    note = "by stage; what is far above most is cut off"
    found.append(chart("Time per rollout", note, "seconds", ordered, kind="stack"))
    return _with_lines([*found, *status_charts(columns)])


def status_charts(columns: Mapping[str, Points]) -> Iterator[Chart]:
    """For each reward the share of each of its statuses, and for all of them the share that it could not judge."""
    missing: dict[str, Points] = {}
    for reward in dict.fromkeys(
        name.split("/")[1] for name in columns if name.startswith("rewards/") and "/status/" in name
    ):
        counts = {status: dict(columns.get(f"rewards/{reward}/status/{status}", [])) for status in get_args(Status)}
        steps = sorted({step for of in counts.values() for step in of})
        totals = {step: sum(of.get(step, 0.0) for of in counts.values()) for step in steps}
        shares: dict[str, Points] = {
            status.replace("_", " ") + " (not judged)" * (status in WITHOUT_VALUE): [
                (step, of.get(step, 0.0) / totals[step]) for step in steps
            ]
            for status, of in counts.items()
            if of
        }
        missing[reward] = [
            (step, sum(counts[status].get(step, 0.0) for status in WITHOUT_VALUE) / totals[step]) for step in steps
        ]
        note = "what became of the completions; those that it could not judge are left out of the loss"
        yield chart(f"Statuses: {reward}", note, "share", shares, kind="stack")
    note = "completions that a reward could not judge for no fault of theirs"
    yield chart("Not judged", note, "share", missing, smooth=True)


def comparison_charts(runs: Runs) -> list[Chart]:
    """A chart for each number of training, with a line for each run that logged it."""
    every = dict.fromkeys(name for columns in runs.values() for name in columns)
    seconds = Numbers("Time of a rollout", "without validation", "seconds", {"step_time": "s"})
    return _with_lines(
        chart(
            title if len(labels) == 1 else f"{title}: {label}",
            note,
            unit,
            {run: columns[name] for run, columns in runs.items() if name in columns},
            smooth=smooth,
        )
        for title, note, unit, labels, smooth in [*_training(every), seconds]
        for name, label in labels.items()
    )


# --- held-out problems ----------------------------------------------------------------------------------------------


def held_out_charts(columns: Mapping[str, Points], validations: Validations) -> list[Chart]:
    """One chart for ``val/…`` and one for each named set ``val/<name>/…``, and their pass@k before and after."""
    names = [name for name in columns if name.startswith("val/")]
    drawn = []
    for place in dict.fromkeys(name.rpartition("/")[0] for name in names):
        leaves = {name: name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == place}
        shares = {name: leaf for name, leaf in leaves.items() if leaf.startswith(SHARES)}
        title = "Held-out problems" if place == "val" else f"Held-out: {place.removeprefix('val/')}"
        drawn.append(Numbers(title, "answered correctly", "share", shares))
    sums = [name for name in names if name.endswith("/reward")]
    named_reward = {f"{summed}s/reward" for summed in sums}  # val/rewards/reward: of a reward with this name
    for summed in [name for name in sums if name not in named_reward]:
        place = summed.removesuffix("/reward")  # of a run without a correctness reward
        below = f"{place}/rewards/"
        rewards = {name: name.removeprefix(below) for name in names if name.startswith(below)}
        title = "Held-out reward" if place == "val" else f"Held-out reward: {place.removeprefix('val/')}"
        note = "weighted sum and each reward, mean over problems"
        total = "sum" if "reward" in rewards.values() else "reward"
        drawn.append(Numbers(title, note, "reward", {summed: total, **rewards}))
    found = []
    for title, note, unit, labels, _ in drawn:
        lines = {label: columns[name] for name, label in labels.items()}
        bands = {label: interval(validations, name) for name, label in labels.items()}
        found.append(chart(title, note, unit, lines, bands=bands))
    for place in dict.fromkeys(place for row in validations for place in row["pass_at"]):
        ends = {f"rollout {row['step']}": row for row in (validations[0], validations[-1])}
        found.append(pass_chart(place, ends))
    return _with_lines(found)


def compared_held_out(runs: Runs, validations: Mapping[str, Validations]) -> list[Chart]:
    """A chart for each held-out share, with a line and its interval for each run, and pass@k after training."""
    found = []
    for name in dict.fromkeys(name for columns in runs.values() for name in columns if name.startswith("val/")):
        rewarded = name == "val/reward" or name.startswith("val/rewards/")
        if rewarded or name.rpartition("/")[2].startswith(SHARES):
            note, unit = ("mean over problems", "reward") if rewarded else ("answered correctly", "share")
            lines = {run: columns[name] for run, columns in runs.items() if name in columns}
            bands = {run: interval(validations[run], name) for run in lines}
            found.append(chart(f"Held-out: {name.removeprefix('val/')}", note, unit, lines, bands=bands))
    last = {run: rows[-1] for run, rows in validations.items() if rows}
    found += [pass_chart(place, last) for place in dict.fromkeys(p for row in last.values() for p in row["pass_at"])]
    return _with_lines(found)


def interval(validations: Validations, name: str) -> Band:
    """(rollouts, low, high) of one held-out metric."""
    measured = [(row["step"], row["metrics"].get(name)) for row in validations]
    return [(step, found["low"], found["high"]) for step, found in measured if found is not None]


def pass_chart(place: str, rows: Mapping[str, Mapping[str, Any]]) -> Chart:
    """pass@k over k in one group of problems, a line for each of some validations."""
    title = "pass@k" if place == "val" else f"pass@k: {place.removeprefix('val/')}"
    note = "probability that one of k samples is right, mean over problems"
    curves = {label: line for label, row in rows.items() if (line := row["pass_at"].get(place))}
    lines: dict[str, Points] = {label: [(k, v) for k, v, *_ in line] for label, line in curves.items()}
    bands = {label: [(k, low, high) for k, _, low, high in line] for label, line in curves.items()}
    return chart(title, note, "share", lines, bands=bands, x="k", log=True)
