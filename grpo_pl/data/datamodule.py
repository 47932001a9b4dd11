"""``RolloutDataModule``: a data set of rollout steps, cut by rank; its whole state is how many were completed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.argument_checks import check_at_least, check_within
from grpo_pl.types import Problem, PromptBatch

T = TypeVar("T")

GROUP = "val"
"""Name of the source's own held-out problems; further sets are ``val/<name>``."""
AS_WRITTEN = "as written"
"""Mark of states whose digests are of cells as files have them; up to version 0.3 their types were guessed."""


class RolloutDataModule(LightningDataModule):
    """Feeds prompts to ``GRPOModule``. Item ``i`` of the training set is ``source.prompts(i)``, cut by rank.

    Args:
        source: where prompts come from.
        steps: rollouts in the whole run; the learning-rate schedule ends there.
        staleness: how many updates old the weights are that a rollout is drawn from, 0 to 4. Rollout k is launched
            before update k − staleness, and drawn in the engine's process while updates are made; 0 draws it when its
            turn comes. Needs an engine in a child process; without ``model.engine`` it is the native one.
        prompts_per_step: prompts of one rollout over all ranks (P); each gets ``algorithm.group_size`` completions.
            Null derives it when a run starts: 256 completions a rollout.
        val_prompts: held-out problems to validate on; null takes all that the source offers.
        val_batch_size: held-out problems per validation batch and rank.
        validation_sets: further sources whose held-out problems are measured by themselves, as ``val/<name>/…``.
        allow_overlap: measure on problems whose very question is trained on, or demonstrated by the cold start.
        allow_changed: go on with a run although the files or data sets that it reads hold something else by now.
    """

    def __init__(
        self,
        source: PromptSource,
        steps: int = 100,
        prompts_per_step: int | None = None,
        val_prompts: int | None = None,
        val_batch_size: int = 64,
        validation_sets: dict[str, PromptSource] | None = None,
        allow_overlap: bool = False,
        allow_changed: bool = False,
        staleness: int = 0,
    ) -> None:
        super().__init__()
        counts = {"steps": steps, "prompts_per_step": prompts_per_step, "val_batch_size": val_batch_size}
        check_at_least(1, "data", **{name: value for name, value in counts.items() if value is not None})
        if val_prompts is not None and val_prompts < 1:
            raise ValueError(
                f"data.val_prompts must be at least 1, or null for all, got {val_prompts}; trainer.limit_val_batches=0 "
                "never validates."
            )
        check_within("[0, 4]", "data", staleness=staleness)
        self.source = source
        self.steps = steps
        self.staleness = staleness
        self.prompts_per_step = prompts_per_step
        self.val_prompts = val_prompts
        self.val_batch_size = val_batch_size
        self.validation_sets = validation_sets or {}
        self.allow_overlap = allow_overlap
        self.allow_changed = allow_changed
        self._held_out: dict[str, list[Problem]] | None = None
        self.completed_rollouts = 0
        self.repeated: int | None = None
        """Number of first rollouts whose prompts come again and again (``trainer.overfit_batches``); None for all."""

    @property
    def prompt_count(self) -> int:
        """``prompts_per_step``.

        Raises:
            ValueError: it is null; ``GRPOModule.derive_defaults`` replaces it when a run starts.
        """
        if self.prompts_per_step is None:
            raise ValueError("data.prompts_per_step is null, and no run has derived it: give a number.")
        return self.prompts_per_step

    def prompts(self, step: int, attempt: int = 0) -> PromptBatch:
        """This rank's share of the prompts of a rollout step."""
        everyone = self.everyones_prompts(step, attempt)
        rank, world = self._rank_and_world()
        check_shares(self.prompt_count, world)
        share = len(everyone) // world
        mine = tuple(everyone[rank * share : (rank + 1) * share])
        return PromptBatch(step=step, prompts=mine, valid=(True,) * share)

    def everyones_prompts(self, step: int, attempt: int = 0) -> list[Problem]:
        """The prompts of all ranks for a rollout step."""
        first = step if self.repeated is None else step % self.repeated
        return self.source.prompts(first, attempt, count=self.prompt_count)

    def repeat_rollouts(self, count: int | float) -> None:
        """Has the prompts of the first rollouts come again and again; 0 has every rollout's own.

        Args:
            count: how many rollouts, or as a float which share of all: ``trainer.overfit_batches``.
        """
        rollouts = max(1, round(count * self.steps)) if isinstance(count, float) and count else int(count)
        self.repeated = rollouts or None

    def check_rollouts_left(self) -> None:
        """Refuses a further fit that would train nothing, and says where one goes on that trains the rest; one from a
        checkpoint goes on from there. To be called once Lightning has read this fit's checkpoint: before, its
        ``ckpt_path`` is that of the Trainer's fit before."""
        trainer: Any = self.trainer
        if trainer.ckpt_path is not None:
            return
        if self.completed_rollouts >= self.steps:
            raise ValueError(
                f"this RolloutDataModule has made its {self.steps} rollouts, and a further fit would train nothing: "
                "give a new one, or raise its steps; the module goes on from the weights that it has."
            )
        if trainer.current_epoch > 0:
            raise ValueError(
                "this Trainer has made its run, and a further fit would train nothing: make another Trainer."
            )
        if self.completed_rollouts > 0:
            rank_zero_warn(
                f"this RolloutDataModule has made {self.completed_rollouts} of its {self.steps} rollouts, and this fit "
                "makes the others: give a new one to begin with the first."
            )

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        trainer = self.trainer
        if trainer is not None and trainer.training and trainer.strategy.restore_checkpoint_after_setup:
            self.check_rollouts_left()  # sharded weights are read after the module's last hook before training
        steps = Steps(self, self.prompts)
        return DataLoader(steps, batch_size=None, sampler=RemainingSteps(steps))

    def val_dataloader(self) -> DataLoader[PromptBatch]:
        return DataLoader(_HeldOut(self), batch_size=None)

    def test_dataloader(self) -> DataLoader[PromptBatch]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[PromptBatch]:
        return self.val_dataloader()

    def held_out(self) -> dict[str, list[Problem]]:
        """The held-out problems of each set: ``val`` are the source's own, ``val/<name>`` those of ``validation_sets``.

        Raises:
            ValueError: there are none, or a problem is there twice in a set.
        """
        if self._held_out is not None:
            return self._held_out
        sources = {GROUP: self.source, **{f"{GROUP}/{name}": more for name, more in self.validation_sets.items()}}
        sets = {name: source.validation(self.val_prompts) for name, source in sources.items()}
        for name, prompts in sets.items():
            check_distinct(prompts, name)
        if not any(sets.values()):
            raise ValueError(
                "the data source has no held-out problems: give it a validation split or a larger val_share, or set "
                "data.validation_sets."
            )
        self._held_out = {name: prompts for name, prompts in sets.items() if prompts}
        return self._held_out

    def held_out_share(self, batches: int) -> int:
        """Held-out problems that this process answers in a validation of so many batches."""
        return sum(len(batch.prompts) for batch in islice(self.val_dataloader(), batches))

    def held_out_groups(self) -> list[str]:
        """Names of all groups of held-out problems, the same on every rank: sets, and the sources of a mixed set."""
        members = groups_of(self.held_out()).values()
        return list(dict.fromkeys(group for groups in members for group in groups))

    def on_exception(self, exception: BaseException) -> None:
        """Ends what the run has started; the last hook that Lightning calls after an error."""
        if self.trainer is not None:
            self.trainer.lightning_module.teardown(str(self.trainer.state.fn))

    def state_dict(self) -> dict[str, Any]:
        digests = {place: digest for place, (digest, _) in self.digests().items()}
        state = {"completed_rollouts": self.completed_rollouts, "source": self.source.state_dict()}
        return {**state, "digests": digests, "cells": AS_WRITTEN} if digests else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.training:
            self.require_unchanged(state_dict)
        self.completed_rollouts = state_dict["completed_rollouts"]
        self.source.load_state_dict(state_dict["source"])

    def require_unchanged(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses to go on from a state on data that have changed: the prompts of a step would be others."""
        before: Mapping[str, str] = state_dict.get("digests", {})
        changed = [
            f"{place} ({path})"
            for place, (digest, path) in self.digests().items()
            if before.get(place, digest) != digest
        ]
        if changed and not self.allow_changed:
            verb = "hold" if len(changed) > 1 else "holds"
            guessed = (
                ""
                if state_dict.get("cells") == AS_WRITTEN
                else (
                    ", or version 0.3, with which it began, read them differently (gold answers such as 007, 1.50, 1 "
                    "beside 2.5, NA or true, and the types of CSV columns)"
                )
            )
            raise ValueError(
                f"{' and '.join(changed)} {verb} other rows than when this run began{guessed}: "
                "restore what was there, begin a run of another --name, or go on with what is there now by "
                "--data.allow_changed=true."
            )

    def digests(self) -> dict[str, tuple[str, str]]:
        """``data.source.train``, ``data.validation_sets.aime.val`` … to the digest of what it holds, and its path."""
        sets = {f"data.validation_sets.{name}": source for name, source in self.validation_sets.items()}
        return {
            ".".join(filter(None, (place, part, split))): (digest, getattr(leaf, "path", ""))
            for place, source in {"data.source": self.source, **sets}.items()
            for part, leaf in source.leaves().items()
            for split, digest in leaf.digests().items()
        }

    def _rank_and_world(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        return share["rank"], share["num_replicas"]


class CountsSteps(Protocol):
    """A data module whose training batches are the steps of a run."""

    steps: int
    completed_rollouts: int


class Steps(Dataset[T]):
    """The batches of all steps of a run, each made when it is asked for."""

    def __init__(self, data: CountsSteps, batch: Callable[[int], T]) -> None:
        self.data, self._batch = data, batch

    def __len__(self) -> int:
        return self.data.steps

    def __getitem__(self, step: int) -> T:
        return self._batch(step)


class RemainingSteps(SequentialSampler):
    """Steps from the first uncompleted one. Its length is the whole run's: Lightning adds what it restored itself,
    and replaces no sampler that is sequential, not even with ``trainer.overfit_batches``."""

    data_source: Steps[Any]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.data_source.data.completed_rollouts, len(self.data_source)))


class _HeldOut(Dataset[PromptBatch]):
    """The held-out problems, set by set, in slices of equal size on every rank, filled up where they do not divide."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.rank, self.world = data._rank_and_world()
        size = data.val_batch_size * self.world
        sets = data.held_out()
        members = groups_of(sets)
        self.slices = [
            (prompts[start : start + size], [members[name, p.source] for p in prompts[start : start + size]])
            for name, prompts in sets.items()
            for start in range(0, len(prompts), size)
        ]

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, index: int) -> PromptBatch:
        prompts, groups = self.slices[index]
        share = -(-len(prompts) // self.world)
        rows = range(self.rank * share, (self.rank + 1) * share)
        inside = [min(row, len(prompts) - 1) for row in rows]
        return PromptBatch(
            step=index,
            prompts=[prompts[row] for row in inside],
            valid=[row < len(prompts) for row in rows],
            groups=[groups[row] for row in inside],
        )


def groups_of(sets: Mapping[str, Sequence[Problem]]) -> dict[tuple[str, str], tuple[str, ...]]:
    """(set, source) to the groups that such a problem counts in: its set, and its source where a set has several.

    Raises:
        ValueError: a source within one set has the name of another set.
    """
    members: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, prompts in sets.items():
        sources = sorted({prompt.source for prompt in prompts})
        for source in sources:
            group = f"{name}/{source}"
            if len(sources) > 1 and group in sets:
                raise ValueError(f"data.validation_sets has a set {source!r}, which is the name of a source as well.")
            members[name, source] = (name, group) if len(sources) > 1 and source else (name,)
    return members


def check_shares(prompts: int, world: int) -> None:
    """Refuses prompts of a rollout that ``world`` processes cannot share equally."""
    if prompts % world:
        raise ValueError(f"data.prompts_per_step={prompts} does not divide among {world} processes: set a multiple.")


def check_distinct(prompts: Sequence[Problem], where: str) -> None:
    """Refuses two problems of one id: they would draw the same samples and count as one."""
    seen: dict[int, Problem] = {}
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(
                f"two problems of {where} have the id {prompt.id}: {seen[prompt.id].question[:80]!r} and "
                f"{prompt.question[:80]!r}. Give each its own."
            )
        seen[prompt.id] = prompt
