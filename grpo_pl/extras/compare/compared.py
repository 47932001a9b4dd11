"""``compare``: two policies answer the same held-out problems with the same keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_pl.cli.commands import check_at_least
from grpo_pl.config.objects import ConfigArguments, closed_rewards
from grpo_pl.extras.compare.paired import FEW, PairedProblems, joined
from grpo_pl.extras.compare.sides import Side, answers_of, common_problems, differing, held_out_of, share_keys
from grpo_pl.files.runs import config_changes, read_settings
from grpo_pl.policy.loading import choose_device
from grpo_pl.rewards.base import require_correctness


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two policies answered to the same problems."""

    a: Side
    b: Side
    samples: int
    """Completions of each problem on each side."""
    temperature: float
    seed: int
    shared_keys: bool
    """False where the tokenizers differ: then equal keys are no equal noise."""
    notes: Sequence[str]
    """What is other in how the two were asked and judged, a line each."""
    sets: Mapping[str, PairedProblems]
    """Name of a held-out set -> its problems."""
    settings: Sequence[str]
    """Settings of the two runs that differ, ``key: of a → of b``; nothing where one of them lies in no run."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for programs and the page."""
        return {
            "a": {"name": self.a.name, "source": str(self.a.model.source)},
            "b": {"name": self.b.name, "source": str(self.b.model.source)},
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "shared_keys": self.shared_keys,
            "notes": list(self.notes),
            "sets": {name: each.as_json() for name, each in self.sets.items()},
            "settings": list(self.settings),
        }


def compare(
    a: str | Path,
    b: str | Path,
    *,
    samples: int = 1,
    problems: int | None = None,
    config: ConfigArguments = None,
    temperature: float | None = None,
    max_completion_length: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: str = "auto",
    runs_dir: str | Path = "runs",
    trust_rewards: bool = False,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Comparison:
    """Lets two policies answer the same held-out problems with the same keys, and puts their answers side by side.

    Args:
        a: a run folder, an export or a checkpoint, or a run's name under ``runs_dir``.
        b: likewise; differences are b − a.
        samples: completions of each problem; with several the intervals are still over problems.
        problems: most problems of each held-out set; all by default.
        config: a configuration that names the problems; by default those of the runs.
        temperature: of the completions of both; by default that of a's training, 0 is greedy.
        max_completion_length: most tokens of a completion; by default each as in its training.
        seed: names the samples.
        batch_size: completions decoded at once.
        device: cpu, cuda …; auto takes a GPU where there is one.
        runs_dir: where runs are looked for by name.
        trust_rewards: let the two name any class as a reward or a source: only if you know who wrote them.
        say: is told what is other on the two sides before anything is drawn, and what is wrong with the result.

    Raises:
        ValueError: a side is missing, they have no problems in common, or no reward says what is right; one line that
            says what to do.
    """
    check_at_least(1, samples=samples, problems=problems, batch_size=batch_size)
    check_at_least(1, max_completion_length=max_completion_length)
    if temperature is not None and not temperature >= 0:
        raise ValueError(f"--temperature must be at least 0, got {temperature}.")
    one, two = (Side.open(path, runs_dir=Path(runs_dir), trust_rewards=trust_rewards) for path in (a, b))
    if one.model.source.resolve() == two.model.source.resolve():
        raise ValueError(f"{a} and {b} are the same weights, {one.model.source}: give two others.")
    if one.name == two.name:
        one, two = replace(one, name=str(a)), replace(two, name=str(b))
    require_correctness(
        closed_rewards(one.model.rewards, trust_rewards=trust_rewards), f"compare judges with the rewards of {a}, and"
    )
    notes = differing(one.model, two.model)
    if config:
        asked, line = common_problems([one, two], [held_out_of(config)], problems)
    else:
        found = [side.held_out(trust_rewards=trust_rewards) for side in (one, two)]
        asked, line = common_problems([one, two], found, problems)
    notes += [line] if line else []
    heat = one.model.sampling.temperature if temperature is None else temperature
    if temperature is None and two.model.sampling.temperature != heat:
        notes.append(f"both draw at temperature {heat:g}, that of {one.name}; --temperature sets another.")
    limits = [side.model.sampling.max_completion_length for side in (one, two)]
    if max_completion_length is None and limits[0] != limits[1]:
        notes.append(f"completions end after {limits[0]} and {limits[1]} tokens (--max-completion-length).")
    for note in notes:
        say(note)
    drawing = {"temperature": heat, "max_completion_length": max_completion_length}
    place, rewards = choose_device(device), one.model.rewards
    drawn = [
        answers_of(
            side,
            asked,
            rewards=rewards,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
            device=place,
            **drawing,
        )
        for side in (one, two)
    ]
    later, total = list[str](), sum(map(len, asked.values()))
    both = drawn[0].keys() & drawn[1].keys()
    asked = {name: [each for each in of if (name, each.id) in both] for name, of in asked.items()}
    if left := total - sum(map(len, asked.values())):
        later.append(f"{left} of {total} problems do not fit into the context of both and are left out.")
    sets = joined({name: of for name, of in asked.items() if of}, *drawn)
    if not sets:
        raise ValueError(f"no problem fits into the context of both {one.name} and {two.name}.")
    later += [
        f"{name}: no answer to any of its problems could be judged on both sides; it is left out."
        for name, of in asked.items()
        if of and name not in sets
    ]
    later += [
        f"{name}: only {each.differing} problems differ, too few for a bootstrap: its interval is too narrow."
        for name, each in sets.items()
        if each.paired.method == "bootstrap" and each.differing < FEW
    ]
    for note in later:
        say(note)
    return Comparison(
        a=one,
        b=two,
        samples=samples,
        temperature=heat,
        seed=seed,
        shared_keys=share_keys(one.model, two.model),
        notes=[*notes, *later],
        sets=sets,
        settings=_changes(one, two),
    )


def _changes(a: Side, b: Side) -> list[str]:
    """The settings of the two runs that differ."""
    runs = [side.run for side in (a, b) if side.run is not None]
    found = [read_settings(run.config.read_text(encoding="utf-8")) for run in runs]
    return config_changes(*found) if len(found) == 2 else []
