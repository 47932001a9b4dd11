"""``verify``: whether an export is what its run trained, by doing parts of the run again and comparing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from grpo_pl.extras.replay import cache
from grpo_pl.extras.replay.comparison import Held, compare
from grpo_pl.extras.replay.forward import NAME, run_forward, run_forward_in_children
from grpo_pl.extras.replay.moment import RecordedFit, Say, checkpoint_at, nearest, tell_surroundings, to_stderr
from grpo_pl.extras.replay.recorded import CannotBegin, CannotReplay, RecordedRun, here
from grpo_pl.files.checkpoints import broken, policy_weights
from grpo_pl.files.rows import read_object
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.files.writing import staged
from grpo_pl.policy.lora import ADAPTERS, has_adapters, merged
from grpo_pl.policy.pretrained import MANIFEST, VERIFIED
from grpo_pl.policy.weights import checkpoint_weights, weights_digest, weights_in

MOST_STEPS = 3
"""Steps that are repeated at most, each from a checkpoint of its own."""


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    what: str
    held: bool | None
    """None where it could not be checked."""
    told: str


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared of a run and its export."""

    run: Path | None
    export: Path | None
    step: int | None
    """Completed rollouts of the export."""
    weights: str | None
    """Digest of the policy in its run, and of the ``files`` of the export."""
    files: str | None
    checks: Sequence[Check]

    @property
    def proved(self) -> bool:
        """True only if there was a run, and everything held."""
        return self.run is not None and all(check.held is True for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain values for files and programs."""
        return {
            "proved": self.proved,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": None if self.run is None else self.run.resolve().name,
            "step": self.step,
            "weights": self.weights,
            "files": self.files,
            "checks": [asdict(check) for check in self.checks],
            "surroundings": here(),
        }


def prove(
    path: str | Path,
    run: str | Path | None = None,
    *,
    samples: int = 20,
    run_rewards: bool = False,
    say: Say = to_stderr,
) -> Proof:
    """Holds an export to its run, and a run to its own record; writes ``verified.json`` into the export's folder.

    Args:
        path: an exported folder, or a run, whose export is held to it.
        run: the run of an export; without one nothing is proved.
        samples: recorded completions that are drawn and scored again at least, as far as the steps behind checkpoints
            have so many.
        run_rewards: also run rewards, judges, agents and environments of the user's own again.
        say: is told what is done.

    Raises:
        CannotReplay: there is no such export or run, or the run cannot begin here, as its data are others.
    """
    folder = Path(path)
    export = folder if (folder / MANIFEST).is_file() else None
    if export is None and run is not None:
        raise CannotReplay(f"{folder} is no export ({MANIFEST} is missing): give an exported folder, or the run alone.")
    if export is not None and run is None:
        return _alone(export)
    recorded = RecordedRun.open(path if run is None else run)
    if export is None and (recorded.folder.export / MANIFEST).is_file():
        export = recorded.folder.export
    tell_surroundings(recorded, say)
    checkpoints = _checkpoints(recorded)
    checks = [_completions_file(recorded), *checkpoints.values()]
    manifest = {} if export is None else _manifest(export)
    if export is not None:
        checks += _export(recorded, export, manifest, run_rewards=run_rewards, say=say)
    starts = [rollouts for rollouts, check in checkpoints.items() if check.held is not False]
    checks += _steps_again(recorded, starts, samples, run_rewards=run_rewards, say=say)
    proof = Proof(
        run=recorded.path,
        export=export,
        step=manifest.get("step"),
        weights=manifest.get("weights"),
        files=manifest.get("files"),
        checks=checks,
    )
    if export is not None:
        with staged(export / VERIFIED) as file:
            file.write_text(json.dumps(proof.as_json(), indent=1) + "\n", encoding="utf-8")
    return proof


# --- the record -------------------------------------------------------------------------------------------------------


def _completions_file(run: RecordedRun) -> Check:
    what, edited = "completions.jsonl", run.completions_edited()
    if edited is None:
        return Check(what, None, "the run recorded no digest of it: it is of version 0.3, runs, or was killed")
    told = f"{run.folder.completions} is not as the run closed it" if edited else "as the run closed it"
    return Check(what, not edited, told)


def _checkpoints(run: RecordedRun) -> dict[int, Check]:
    """By completed rollouts."""
    found = {}
    for rollouts, path in run.checkpoints().items():
        what, recorded = f"checkpoint {path.name}", run.digests.get(rollouts)
        if (reason := broken(path)) is not None:
            found[rollouts] = Check(what, False, reason)
        elif recorded is None:
            found[rollouts] = Check(what, None, "the run recorded no digest of its weights")
        elif (ours := weights_digest(policy_weights(read_checkpoint(path)).items())) != recorded:
            others = [step for step, digest in run.digests.items() if digest == ours]
            told = f"its weights are those after rollout {others[0]}" if others else "its weights are none of the run's"
            found[rollouts] = Check(what, False, told)
        else:
            found[rollouts] = Check(what, True, "its weights have the digest that the run recorded")
    return found


# --- the export -------------------------------------------------------------------------------------------------------


def _manifest(export: Path) -> Mapping[str, Any]:
    """What the manifest says of the export's run."""
    try:
        told = read_object(export / MANIFEST).get("run") or {}
    except ValueError as error:
        raise CannotReplay(str(error)) from error
    if not isinstance(told, dict) or not (
        {"name", "weights", "files"} <= told.keys() and type(told.get("step")) is int
    ):
        raise CannotReplay(
            f"{export / MANIFEST} does not name the run of its weights, as exports of version 0.3 do not: export the "
            "run's checkpoint again."
        )
    return told


def _files(export: Path, told: Mapping[str, Any]) -> Check:
    same = weights_digest(weights_in(export)) == told["files"]
    return Check("files of weights", same, f"{'as' if same else 'not as'} {MANIFEST} says ({told['files'][:12]}…)")


def _export(run: RecordedRun, export: Path, told: Mapping[str, Any], *, run_rewards: bool, say: Say) -> list[Check]:
    step, recorded = int(told["step"]), run.digests.get(int(told["step"]))
    checks = [_files(export, told)]
    if recorded is None:
        checks.append(Check("manifest", False, f"the run recorded no weights after {step} rollouts"))
        return checks
    same = told["weights"] == recorded
    meant = f"rollout {step} of {told['name']}"
    checks.append(Check("manifest", same, f"{'names' if same else 'names other weights than'} those of {meant}"))
    if not same:
        return checks
    if (export / ADAPTERS).is_file():
        checks.append(Check("weights", None, "adapters without their base are compared by their digest alone"))
        return checks
    try:
        checkpoint = checkpoint_at(run, step, run_rewards=run_rewards, say=say)
    except CannotBegin:
        raise
    except CannotReplay as error:
        return [*checks, Check("weights", False, str(error))]
    return [*checks, _same_tensors(export, checkpoint, meant)]


def _same_tensors(export: Path, checkpoint: Path | None, meant: str) -> Check:
    """The export's tensors against those that the checkpoint would give, adapters merged."""
    from grpo_pl.policy.trained import find_model

    assert checkpoint is not None
    model = find_model(checkpoint, trust_rewards=True).load_policy("cpu")
    ours = dict(weights_in(export))
    wanted = dict(checkpoint_weights(merged(model) if has_adapters(model) else model))
    if names := ours.keys() ^ wanted.keys():
        return Check("weights", False, f"{min(names)} is on one side only")
    for name, weight in wanted.items():
        other = ours[name]
        if weight.dtype != other.dtype or not torch.equal(weight, other):
            far = (
                f" by up to {(weight.double() - other.double()).abs().max():.3g}" if weight.shape == other.shape else ""
            )
            return Check("weights", False, f"{name} differs{far} from {meant}")
    return Check("weights", True, f"all {len(wanted)} tensors are those of {meant}")


def _alone(export: Path) -> Proof:
    """An export without a run: its own digest, and that it draws alike twice."""
    told = _manifest(export)
    checks = [_files(export, told), _drawn_twice(export)]
    parent = RunFolder(export.absolute().parent)
    hint = f": give --run {export.parent}" if parent.record.is_file() else ": give --run, the folder of its run"
    checks.append(Check("run", None, f"not proved: no run{hint}"))
    return Proof(
        run=None, export=export, step=told["step"], weights=told["weights"], files=told["files"], checks=checks
    )


def _drawn_twice(export: Path) -> Check:
    from grpo_pl.cli.answering import load_answerer
    from grpo_pl.policy.trained import find_model
    from grpo_pl.types import Problem

    found = find_model(export)
    asked = [example["problem"] for example in found.examples] or ["2+3="]
    problems = [Problem(id=number, question=question, answer="") for number, question in enumerate(asked)]
    answerer = load_answerer(found, "cpu")
    with answerer.closed():
        one, two = (answerer.sample(problems, samples=2, seed=0) for _ in range(2))
    same = torch.equal(one.rollout.completion_ids, two.rollout.completion_ids)
    told = f"{len(one.completions)} completions are {'alike' if same else 'not alike'} by the same keys"
    return Check("drawn twice", same, told)


# --- steps made again -------------------------------------------------------------------------------------------------


def _steps_again(run: RecordedRun, whole: Sequence[int], samples: int, *, run_rewards: bool, say: Say) -> list[Check]:
    """Completions and updates of steps right behind checkpoints that are whole, the newest first, until enough are
    drawn."""
    try:
        run.check_trusted(run_rewards)
    except CannotReplay as error:
        return [Check("steps again", None, str(error))]
    paths = run.checkpoints()
    starts: list[tuple[int, Path | None]] = [
        (rollouts, paths[rollouts]) for rollouts in reversed(whole) if rollouts < run.completed
    ]
    if not starts and run.completed > run.start:
        starts = [nearest(run, run.start, say)]
    checks, drawn = list[Check](), 0
    for step, checkpoint in starts[:MOST_STEPS]:
        if drawn >= samples:
            break
        say(f"repeating rollout {step + 1} from {'the start' if checkpoint is None else checkpoint.name} …")
        held = _step_again(run, step, checkpoint)
        drawn += held.completions
        checks.append(Check(f"rollout {step + 1} again", held.first is None, _told(held)))
    if not checks:
        checks.append(Check("steps again", None, "the run has made no rollout"))
    elif drawn == 0:
        checks.append(Check("completions again", None, "completions.jsonl has none of these rollouts"))
    return checks


def _step_again(run: RecordedRun, step: int, checkpoint: Path | None) -> Held:
    with cache.workplace() as folder:
        if run.processes == 1:
            run_forward(run, checkpoint, step + 1, folder)
        else:
            run_forward_in_children(run, checkpoint, step + 1, folder)
        return compare(run, RecordedFit(RunFolder(folder / NAME)), step, step + 1)


def _told(held: Held) -> str:
    after = (
        ", the weights before and after it" if held.weights > 1 else ", the weights before it" if held.weights else ""
    )
    by = f"by the token ids of {held.token_ids}" if held.token_ids else "by their texts"
    done = f"{held.completions} completions drawn and scored ({by}), its update{after}"
    return f"{done}: as recorded" if held.first is None else str(held.first)
