"""``replay``: a recorded run as it was before any of its steps, bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.extras.replay import cache
from grpo_pl.extras.replay.comparison import Held, compare
from grpo_pl.extras.replay.forward import ALONE, NAME, Forward, run_forward, run_forward_in_children
from grpo_pl.extras.replay.recorded import CannotBegin, CannotReplay, RecordedRun, whole_checkpoints
from grpo_pl.files.checkpoints import checkpoint_path, policy_weights
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.weights import weights_digest
from grpo_pl.training.module import GRPOModule

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A run before one of its steps."""

    run: RecordedRun
    step: int
    """Completed rollouts; the next one is the step of this number, from 0."""
    module: GRPOModule
    """With the policy as it was, and all other states of a checkpoint."""
    data: RolloutDataModule
    optimizer: torch.optim.Optimizer
    trainer: Trainer
    held: Held
    """What of it was compared with the record."""
    exact: bool
    """False where the surroundings are others than the run's: then it is equal up to rounding."""

    @property
    def weights(self) -> str:
        """Digest of the policy's weights."""
        return weights_digest(self.module.require_policy().state_dict().items())


def to_stderr(line: str) -> None:
    """Prints a line where progress is told."""
    print(line, file=sys.stderr)


def replay(run: str | Path | RecordedRun, step: int, *, run_rewards: bool = False, say: Say = to_stderr) -> Moment:
    """Module, data module and optimiser of a run exactly as they were before a step.

    The nearest checkpoint at or before it is taken, and whole steps are made again up to it, with the run's threads and
    number of processes; they are held to the record. What is made stays in the cache, up to a limit. Nothing is written
    into the run folder.

    Args:
        run: the run's folder, or its name under ``runs``.
        step: from 0; the number of rollouts that the run has made gives its end.
        run_rewards: also run rewards, judges, agents and environments of the user's own again, which may cost money.
        say: is told what it will cost, and what is other here than there.

    Raises:
        CannotReplay: one line that says what to do.
    """
    recorded = run if isinstance(run, RecordedRun) else RecordedRun.open(run)
    recorded.check_step(step)
    recorded.check_trusted(run_rewards)
    recorded.check_completions()
    exact = not tell_surroundings(recorded, say)
    with cache.workplace() as folder:
        made = make(recorded, step, folder, say)
        held = made.held
        if held.first is not None and exact:
            raise CannotReplay(unlike_the_record(recorded, held))
        if held.first is not None:
            say(f"the replay is not bit-equal, as the surroundings let expect: {held.first}.")
        fit = made.fit or run_forward(recorded, made.checkpoint, step, folder / "looked at", ALONE)
    (optimizer,) = fit.trainer.optimizers
    return Moment(
        run=recorded,
        step=step,
        module=fit.model,
        data=fit.datamodule,
        optimizer=optimizer,
        trainer=fit.trainer,
        held=held,
        exact=exact,
    )


def checkpoint_at(run: RecordedRun, step: int, *, run_rewards: bool = False, say: Say = to_stderr) -> Path | None:
    """A checkpoint of a run before a step: its own, one of the cache, or one that is made now as `replay` does; None
    for step 0, at which a run begins without one.

    Raises:
        CannotReplay: as `replay`.
    """
    run.check_step(step)
    if step == 0:
        return None
    start, checkpoint = nearest(run, step, say)
    if checkpoint is not None and start == step:
        return checkpoint
    run.check_trusted(run_rewards)
    run.check_completions()
    exact = not tell_surroundings(run, say)
    with cache.workplace() as folder:
        made = make(run, step, folder, say)
        if made.held.first is not None and exact:
            raise CannotReplay(unlike_the_record(run, made.held))
    return made.checkpoint


@dataclass(frozen=True, kw_only=True)
class Made:
    """A state that was restored or made."""

    checkpoint: Path | None
    """In the run folder or the cache; None at the start of a run."""
    held: Held
    fit: Forward | None
    """Where this process has come to that state."""


def nearest(run: RecordedRun, step: int, say: Say) -> tuple[int, Path | None]:
    """The nearest whole checkpoint at or before a step, of the run or of the cache, whose weights are those that the
    run recorded; (0, None) for the run's start.

    Raises:
        CannotReplay: a checkpoint of the run holds other weights, or the one that it began from is gone.
    """
    found = {**cache.made(run), **run.checkpoints()}
    if run.started_from is not None:
        found.setdefault(run.start, run.started_from)
    for rollouts, path in whole_checkpoints(found, step):
        recorded = run.digests.get(rollouts)
        if recorded is None or recorded == weights_digest(policy_weights(read_checkpoint(path)).items()):
            if path.is_relative_to(cache.replay_root()):
                os.utime(path)
            return rollouts, path
        if not path.is_relative_to(cache.replay_root()):
            raise CannotReplay(
                f"{path} does not hold the weights that the run recorded after {rollouts} rollouts (digests.jsonl): "
                "put back the checkpoint, or remove it to replay from an earlier one."
            )
    if run.started_from is not None:
        raise CannotBegin(
            f"{run.path} began from {run.started_from}, which is missing or no longer whole: put it back, or make it "
            "again by replaying the run that it is of."
        )
    return 0, None


def make(run: RecordedRun, step: int, folder: Path, say: Say) -> Made:
    """Plays a run forward to a step from the nearest checkpoint, keeps what it makes in the cache, and compares.

    Args:
        folder: of the replay, see `cache.workplace`.
    """
    start, checkpoint = nearest(run, step, say)
    alone = run.processes == 1
    if start == step and not alone:
        held = Held(first=None, steps=0, completions=0, token_ids=0, weights=1)
        return Made(checkpoint=checkpoint, held=held, fit=None)
    if start < step or checkpoint is None:
        say(cost(run, start, checkpoint, step))
    fit = None
    if alone:
        fit = run_forward(run, checkpoint, step, folder)
    else:
        run_forward_in_children(run, checkpoint, step, folder)
    written = RecordedFit(RunFolder(folder / NAME))
    held = compare(run, written, start, step)
    if start < step:
        checkpoint = cache.keep(run, checkpoint_path(written.folder.checkpoints, step), step)
    return Made(checkpoint=checkpoint, held=held, fit=fit)


class RecordedFit(RecordedRun):
    """What a replay itself writes, which is no whole run folder."""


def cost(run: RecordedRun, start: int, checkpoint: Path | None, step: int, states: int = 1) -> str:
    """A line with time and disk that a replay takes.

    Args:
        states: how many are kept in the cache.
    """
    seconds = sum(run.seconds.get(number, 0.0) for number in range(start, step))
    begin = "its start, with its cold start where that is no longer cached" if checkpoint is None else checkpoint.name
    size = cache.size_of_state(run)
    disk = f" and {states * size / 1e6:.0f} MB in {cache.replay_root()}" if size and states else ""
    return (
        f"replaying {step - start} rollouts of {run.path} from {begin}: about {max(seconds, 1):.0f} s beside the start"
        f"{disk}."
    )


def tell_surroundings(run: RecordedRun, say: Say) -> list[str]:
    """What is other here than there, told in one line; nothing where a replay should be equal bit for bit."""
    changed = run.surroundings_changed()
    if run.earlier:
        told = "rewards, texts of completions and norms of gradients"
        say(f"{run.path} kept no digests, as runs of version 0.3: the replay is held to {told}, not to token ids.")
    elif not run.token_digests and any(run.completions(0, run.completed)):
        say(f"{run.path} kept no digests of token ids: the replay is held to the texts of completions.")
    if changed:
        say(f"equal up to rounding only, for the run had other surroundings: {'; '.join(changed)}.")
    return changed


def unlike_the_record(run: RecordedRun, held: Held) -> str:
    """The line for a replay that is not the run."""
    model, causes = run.settings["model"], []
    if model.get("environment"):
        causes.append(f"the environment {model['environment']['class_path']} has a clock or random numbers of its own")
    kinds = [str(spec["class_path"]).rpartition(".")[2] for spec in model["rewards"]]
    asked = [kind for kind in kinds if "Judge" in kind or "Endpoint" in kind]
    causes += [f"{kind} answers otherwise" for kind in asked]
    if (run.path / "config.1.yaml").exists():
        causes.append("it was resumed with other settings (config.1.yaml)")
    causes.append("another GRPO_PL_NATIVE was set")
    causes.append("its files were edited")
    return f"{run.path} cannot be replayed from there: {held.first}. It may be that {', or '.join(causes)}."
