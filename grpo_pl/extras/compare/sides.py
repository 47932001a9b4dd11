"""One side of a comparison: a run or an export, its held-out problems, and its answers to them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpo_pl
from grpo_pl.callbacks.completions import exchange_text
from grpo_pl.cli.answering import load_answerer
from grpo_pl.config.objects import ConfigArguments, settings
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.extras.compare.paired import Answer
from grpo_pl.files.rows import read_object
from grpo_pl.files.runs import RunFolder, runs_of_name
from grpo_pl.policy.pretrained import MANIFEST
from grpo_pl.policy.trained import ServedModel, find_model
from grpo_pl.rewards.base import require_correctness
from grpo_pl.rewards.trust import check_source_trusted
from grpo_pl.rollout.sampler import episode_row
from grpo_pl.types import Problem

HeldOut = Mapping[str, Sequence[Problem]]
"""Set -> problems, as `RolloutDataModule.held_out` gives them."""
READ = ("0.3",)
"""Earlier versions whose runs and exports this one reads."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A policy that is compared."""

    name: str
    """Of its run or folder, and of its checkpoint where one was given."""
    model: ServedModel
    run: RunFolder | None
    """The run that it lies in; None for an export that was moved away."""

    @classmethod
    def open(cls, path: str | Path, *, runs_dir: Path, trust_rewards: bool) -> Side:
        """The policy of a run folder (its export, or else its last checkpoint), an export, a checkpoint, or of a run by
        its name under ``runs_dir``.

        Raises:
            ValueError: there is none, or it is of a version that cannot be read; one line that says what to do.
        """
        found = Path(path)
        if not found.exists() and len(found.parts) == 1 and (named := runs_of_name(runs_dir, str(path))):
            if len(named) > 1:
                folders = " and ".join(str(folder.path) for folder in named)
                raise ValueError(f"{folders} are runs of the name {str(path)!r}: give the folder of one.")
            found = named[0].path
        if not found.exists():
            raise ValueError(f"there is no run or export {str(path)!r}: give its folder, such as runs/quickstart.")
        model = find_model(found, trust_rewards=trust_rewards)
        source = model.source.absolute()
        around = (RunFolder(source.parent), RunFolder(source.parent.parent))
        run = next((each for each in around if each.config.is_file()), None)
        _check_version(found, model, run)
        at = "" if model.checkpoint is None or found.is_dir() else f" {source.stem}"
        return cls(name=f"{model.name}{at}", model=model, run=run)

    def held_out(self, *, trust_rewards: bool) -> HeldOut | None:
        """The held-out problems of its run; None without a run that has some.

        Raises:
            ValueError: a source that is not built without ``trust_rewards``.
        """
        if self.run is None:
            return None
        data = settings(str(self.run.config), "data").get("data") or {}
        if "source" not in data:  # of supervised fine-tuning
            return None
        if not trust_rewards:
            for source in (data["source"], *(data.get("validation_sets") or {}).values()):
                check_source_trusted(source)
        return held_out_of(str(self.run.config))


def held_out_of(config: ConfigArguments) -> HeldOut:
    """The held-out problems of a configuration."""
    return settings(config, "data").build("data", RolloutDataModule).held_out()


def _check_version(path: Path, model: ServedModel, run: RunFolder | None) -> None:
    """Refuses a run or an export of a version that this one does not read."""
    manifest = model.source / MANIFEST
    if manifest.is_file():
        theirs = read_object(manifest).get("grpo_pl_version")
    elif run is not None and run.record.is_file():
        theirs = (read_object(run.record).get("versions") or {}).get("grpo_pl")
    else:
        return
    ours = grpo_pl.__version__
    if ".".join(str(theirs or "").split(".")[:2]) not in (".".join(ours.split(".")[:2]), *READ):
        raise ValueError(
            f"{path} was made by grpo_pl {theirs or 'of an unknown version'}, and this is {ours}: install that version "
            "to compare it, or train it again."
        )


def common_problems(sides: Sequence[Side], found: Sequence[HeldOut | None], limit: int | None) -> tuple[HeldOut, str]:
    """The problems that both were held out on, and a line where these are not all of them; where one side knows none,
    those of the other.

    Args:
        limit: most problems of each set.

    Raises:
        ValueError: neither knows any, or they are different ones.
    """
    known = [each for each in found if each is not None]
    if not known:
        raise ValueError(
            f"neither {sides[0].name} nor {sides[1].name} lies in the folder of a run with held-out problems: name the "
            "problems with --config, a file with data.source."
        )
    first, second = known[0], known[-1]
    names = " and ".join(side.name for side in sides)
    advice = "name the problems of both with --config, a file with data.source."
    kept: dict[str, list[Problem]] = {}
    for name in first.keys() & second.keys():
        there = {each.id: each for each in second[name]}
        for each in first[name]:
            other = there.get(each.id)
            if other is not None and (other.asked, other.answer) != (each.asked, each.answer):
                raise ValueError(
                    f"{names} have different held-out problems: {each.id} of {name} is {each.question[:60]!r} in one "
                    f"and {other.question[:60]!r} in the other; {advice}"
                )
        kept[name] = [each for each in first[name] if each.id in there]
    kept = {name: kept[name][:limit] for name in first if kept.get(name)}
    if not kept:
        raise ValueError(f"{names} have different held-out problems: they have none in common; {advice}")
    most = max(sum(min(len(of), limit or len(of)) for of in each.values()) for each in known)
    count = sum(map(len, kept.values()))
    return kept, f"{count} of {most} held-out problems are those of both." if count < most else ""


def differing(a: ServedModel, b: ServedModel) -> list[str]:
    """What is other in how the two are asked and judged, a line each.

    Raises:
        ValueError: they act in different environments.
    """
    if (a.environment or {}).get("class_path") != (b.environment or {}).get("class_path"):
        kinds = " and ".join((of.environment or {}).get("class_path", "none") for of in (a, b))
        raise ValueError(f"{a.name} and {b.name} act in different environments, {kinds}: they have no common problems.")
    lines = []
    if not share_keys(a, b):
        lines.append("their tokenizers differ, so equal keys draw nothing alike: compared by problem, keys unshared.")
    if a.template != b.template:
        lines.append("their prompt templates differ: each reads its own.")
    if list(a.rewards) != list(b.rewards):
        lines.append(f"their rewards differ: both are judged by the correctness reward of {a.name}.")
    return lines


def share_keys(a: ServedModel, b: ServedModel) -> bool:
    """True if equal keys are equal noise: both draw from the same tokens."""
    return bool(a.tokenizer.get_vocab() == b.tokenizer.get_vocab())


def answers_of(
    side: Side,
    problems: HeldOut,
    *,
    rewards: Sequence[Mapping[str, Any]],
    samples: int,
    seed: int,
    batch_size: int,
    device: str,
    **drawing: Any,
) -> dict[tuple[str, int], list[Answer]]:
    """The judged completions of one policy; problems that leave no room for one in its context are missing.

    Args:
        rewards: specifications, of which the one with ``correctness`` judges.
        samples: completions of each problem.
        seed: with the problem's id and the number of the sample, it is the key of a draw.
        batch_size: completions decoded at once.
        drawing: ``temperature`` and ``max_completion_length``, see `load_answerer`.
    """
    answerer = load_answerer(replace(side.model, rewards=rewards), device, **drawing)
    judge = replace(answerer, rewards=[answerer.rewards[require_correctness(answerer.rewards, "compare")]])
    found: dict[tuple[str, int], list[Answer]] = {}
    with redirect_stdout(sys.stderr):  # which is for the result
        for name, asked in problems.items():
            long = judge.too_long(asked, len(asked))
            rest = [each for each in asked if each.id not in long]
            title = side.name if len(problems) == 1 else f"{side.name}, {name}"
            batches = judge.answers(title, rest, len(rest), samples=samples, seed=seed, batch_size=batch_size)
            with closing(batches):
                for drawn, scored in batches:
                    texts = list(drawn.completions)
                    if drawn.episodes is not None:
                        texts = [exchange_text(episode_row(episode)) for episode in drawn.episodes]
                    lengths, correct = drawn.rollout.action_lengths.tolist(), scored.correct()
                    for row, problem in enumerate(drawn.per_row):
                        answer = Answer(
                            text=texts[row],
                            correct=correct[row],
                            tokens=lengths[row],
                            finish_reason=drawn.rollout.finish_reasons[row],
                        )
                        found.setdefault((name, problem.id), []).append(answer)
    del answerer, judge  # before the other policy is loaded
    gc.collect()
    return found
