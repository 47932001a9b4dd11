"""``RolloutDataModule``: a data set of rollout steps, cut by rank; its whole state is how many were completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Prompt


class PromptBatch:
    """The prompts of one rank for one rollout step (training) or one slice of the held-out problems.

    A plain class, because Lightning takes tuples and dataclasses apart to move their tensors, and refuses frozen ones.

    Args:
        step: the rollout step, or the number of the slice.
        prompts: this rank's prompts.
        valid: false for prompts that only fill a rank's slice up to the common size, so that all ranks do equal work.
    """

    def __init__(self, *, step: int, prompts: Sequence[Prompt], valid: Sequence[bool]) -> None:
        self.step, self.prompts, self.valid = step, tuple(prompts), tuple(valid)


class RolloutDataModule(LightningDataModule):
    """Feeds prompts to ``GRPOModule``. Item ``i`` of the training set is ``source.prompts(i)``, cut by rank.

    Args:
        source: where prompts come from.
        steps: rollouts in the whole run; the learning-rate schedule ends there.
        prompts_per_step: prompts of one rollout over all ranks (P); each gets ``algorithm.group_size`` completions.
        val_prompts: held-out problems to validate on; null takes all that the source offers.
        val_batch_size: held-out problems per validation batch and rank.
    """

    def __init__(
        self,
        source: PromptSource,
        steps: int = 100,
        prompts_per_step: int = 32,
        val_prompts: int | None = None,
        val_batch_size: int = 64,
    ) -> None:
        super().__init__()
        for name, value in (("steps", steps), ("prompts_per_step", prompts_per_step), ("val_batch", val_batch_size)):
            if value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}.")
        self.source = source
        self.steps = steps
        self.prompts_per_step = prompts_per_step
        self.val_prompts = val_prompts
        self.val_batch_size = val_batch_size
        self.completed_rollouts = 0

    def prompts(self, step: int, attempt: int = 0) -> PromptBatch:
        """This rank's share of the prompts of a rollout step."""
        everyone = self.source.prompts(step, attempt, count=self.prompts_per_step)
        rank, world = self._rank_and_world()
        if self.prompts_per_step % world:
            raise ValueError(f"data.prompts_per_step={self.prompts_per_step} does not divide among {world} processes.")
        share = len(everyone) // world
        mine = tuple(everyone[rank * share : (rank + 1) * share])
        return PromptBatch(step=step, prompts=mine, valid=(True,) * share)

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        return DataLoader(_Steps(self), batch_size=None, sampler=_Remaining(self))

    def val_dataloader(self) -> DataLoader[PromptBatch]:
        return DataLoader(_HeldOut(self), batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        return {"completed_rollouts": self.completed_rollouts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.completed_rollouts = state_dict["completed_rollouts"]

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


class _Steps(Dataset[PromptBatch]):
    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps

    def __getitem__(self, step: int) -> PromptBatch:
        return self.data.prompts(step)


class _Remaining(Sampler[int]):
    """Steps from the first uncompleted one. Its length is the whole run's: Lightning adds what it restored itself."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.data.completed_rollouts, self.data.steps))


class _HeldOut(Dataset[PromptBatch]):
    """The held-out problems in slices of equal number on every rank, filled up where they do not divide."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.prompts = data.source.validation(data.val_prompts)
        if not self.prompts:
            raise ValueError(
                "the source has no held-out problems: give it a validation split, or set data.val_prompts."
            )
        self.rank, self.world = data._rank_and_world()
        self.slice = data.val_batch_size * self.world

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.slice)

    def __getitem__(self, index: int) -> PromptBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = self.prompts[index * self.slice : (index + 1) * self.slice]
        share = -(-len(rows) // self.world)
        padded = [rows[i] if i < len(rows) else rows[-1] for i in range(share * self.world)]
        mine = slice(self.rank * share, (self.rank + 1) * share)
        return PromptBatch(
            step=index, prompts=tuple(padded[mine]), valid=tuple(i < len(rows) for i in range(share * self.world))[mine]
        )
