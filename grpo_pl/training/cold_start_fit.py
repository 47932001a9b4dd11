"""``make_start``: a cold start as supervised fine-tuning by a second Trainer, inside of the fit that begins from it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.second_trainer import fit_beside
from grpo_pl.distributed.sharding import whole_model
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.files.checkpoints import PATTERN, CheckpointError, checkpoint_path, read_file, remove, rollouts_of
from grpo_pl.files.writing import best_effort, staged_folder, system_errors
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer
from grpo_pl.policy.lora import has_adapters, merged
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.weights import is_sharded
from grpo_pl.training.cold_start import ColdStart, Optimizer
from grpo_pl.training.lightning_loops import completed_rollouts, data_of, set_progress
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.progress import progress_bar
from grpo_pl.training.sft import Example
from grpo_pl.training.sft_module import SFTModule
from grpo_pl.training.stage import Stage
from grpo_pl.training.step_run import Rows, Split, StepData
from grpo_pl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.data.sources import PromptSource

WHOLE = 2**62
"""Tokens that no batch has."""
MUON_RATE = 3.0
"""Muon's rate as a multiple of AdamW's; see ``ColdStart.optimizer``."""
SAVE_EVERY_SECONDS = 60.0
"""Shortest time between two checkpoints."""
LARGEST_SHARE = 0.05
"""Most of the time that writing checkpoints may take."""


class StepReport(Protocol):
    """Called after every optimiser step."""

    def __call__(self, done: int, total: int, *, loss: float, lr: float) -> None: ...


def make_start(
    start: ColdStart,
    policy: PolicyConfig,
    template: PromptTemplate,
    source: PromptSource,
    stage: Stage | None = None,
    *,
    trainer: Trainer,
    activation_checkpointing: bool = False,
    bar: bool = True,
    report: StepReport | None = None,
) -> Path:
    """Trains a cold start, unless it is cached, from the last checkpoint of a run that did not get to the end; returns
    the folder of the model. All processes of ``trainer`` call it.

    Args:
        start: with its numbers, none of them null.
        policy: what it begins with; characters ``from_data`` are known by now.
        template: how a question becomes a prompt.
        source: of the demonstrations, where ``start`` names no file.
        stage: where the source's demonstrations are played; None takes each as a completion.
        trainer: a second Trainer with its strategy, devices and precision makes the fit.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
        bar: show a progress bar of its own.
        report: called after every step, in the first process.
    """
    folder = start.folder(policy, template, source, stage, trainer=trainer)
    if not _is_missing(folder, trainer):
        return folder
    steps, batch_size, lr = start.size
    schedule = Optimization(lr=lr, warmup_rollouts=steps // 10, schedule="cosine", weight_decay=0.01)
    module = StartModule(policy, template, schedule, start.optimizer, activation_checkpointing)

    def batches(first: int) -> Iterator[list[Example]]:
        return start.batches(template, source, module.tokenizer, stage, first=first)

    data = StartData(steps, batch_size, batches, digest=folder.name)
    saved = SaveNowAndThen(folder.with_name(f"{folder.name}.steps"))
    with ExitStack() as around:
        reports: list[StepReport] = []
        if trainer.is_global_zero:
            if stage is not None:
                around.enter_context(stage.open())
            if bar:
                advance = around.enter_context(progress_bar("cold start", steps))
                reports.append(lambda done, total, *, loss, lr: advance(done, f"loss {loss:.3f}"))
            reports += [] if report is None else [report]
        callbacks = [*map(ReportSteps, reports), saved]
        fit_beside(trainer, module, data, callbacks, saved.newest(trainer), whole=start.whole)
    _write(module, trainer, folder)
    saved.remove(trainer)
    return folder


def _is_missing(folder: Path, trainer: Trainer) -> bool:
    """True if a process that is to load the start does not find it; what is sharded is loaded by the first alone."""
    loads = trainer.is_global_zero or not isinstance(trainer.strategy, FSDP2Strategy)
    collective = Collective(rank=trainer.global_rank, world=trainer.world_size)
    return collective.any(loads and not folder.is_dir(), trainer.strategy.root_device)


def _write(module: StartModule, trainer: Trainer, folder: Path) -> None:
    """Writes the result, in one process of each machine, or where weights are sharded in the first alone."""
    model = whole_model(module.policy) if is_sharded(module.policy) else module.policy
    if model is not None and trainer.local_rank == 0:
        model = merged(model) if has_adapters(model) else model
        with staged_folder(folder, replace=False) as staging, system_errors():  # another run may be first
            model.save_pretrained(staging)
            module.tokenizer.save_pretrained(staging)
    trainer.strategy.barrier()  # nobody goes on before it is written


class WholeBatches(TokenBudget):
    """A budget that leaves a batch whole, and its rows in their order, until memory runs out."""

    def cut(self, rollout: Rollout, rows: Tensor, policy: PreTrainedModel) -> list[Tensor]:
        return [rows] if self.tokens == WHOLE else super().cut(rollout, rows, policy)


class StartModule(SFTModule):
    """`SFTModule` by AdamW or Muon, on examples that a `StartData` brings.

    One forward and backward pass has a process's whole share of a batch, or half of it each time that the memory of a
    single GPU runs out: a start depends on nothing that the name of its folder does not tell.

    Args:
        policy: the language model to train; characters ``from_data`` are known by now.
        template: how a prompt becomes what the policy reads.
        optimization: with a rate.
        optimizer: see ``ColdStart.optimizer``.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        template: PromptTemplate,
        optimization: Optimization,
        optimizer: Optimizer = "adamw",
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(policy, template, optimization=optimization, activation_checkpointing=activation_checkpointing)
        self.optimizer = optimizer
        self.budget = WholeBatches(tokens=WHOLE)

    def on_fit_start(self) -> None:
        """Looks for no budget, which free memory would tell: the same start has the same bits on any machine."""

    def read_rows(self) -> None:
        self.tokenizer = load_tokenizer(self.policy_config)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return super().configure_optimizers()
        ends = (self.policy.get_input_embeddings(), self.policy.get_output_embeddings())
        outer = {id(end.weight) for end in ends if end is not None}
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        inner = [weight for weight in trained if weight.ndim == 2 and id(weight) not in outer]
        among, schedule = {id(weight) for weight in inner}, self.optimization
        group = {"params": inner, "rate": MUON_RATE}
        muon = torch.optim.Muon(
            [group], lr=schedule.peak, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, schedule.build(weight for weight in trained if id(weight) not in among)]


class StartData(StepData[Example]):
    """The examples of each step, made in the first process and divided among all.

    Args:
        steps: optimiser steps.
        batch_size: examples of a step.
        batches: makes those of a step and of all after it.
        digest: of everything that they depend on.
    """

    per_step_option, rows_option = "batch_size", "demonstrations"

    def __init__(
        self, steps: int, batch_size: int, batches: Callable[[int], Iterator[list[Example]]], digest: str = ""
    ) -> None:
        super().__init__(steps, batch_size, seed=0)
        self._batches, self._digest = batches, digest
        self._coming: Iterator[list[Example]] | None = None

    def batch(self, step: int) -> Rows[Example]:
        """This process's examples of a step; one that does not count, where there are fewer than processes."""
        rank, world = self._rank_and_world()
        if self._coming is None:
            self._coming = Collective(rank=rank, world=world).from_first(lambda: self._batches(step))
        everyones = next(self._coming)
        return Rows(everyones[rank::world]) if everyones[rank::world] else Rows(everyones[:1], filling=True)

    def rows(self, split: Split) -> Sequence[Example]:
        return ()

    def digest(self) -> str:
        return self._digest


class ReportSteps(Callback):
    """Calls ``report`` after every step."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, StartModule)
        done, total = completed_rollouts(trainer), data_of(trainer).steps
        self.report(done, total, loss=float(outputs["loss"]), lr=pl_module.optimization.lr_at(done - 1, total))


class SaveNowAndThen(Callback):
    """Saves between two steps, now and then, so that a later process goes on to the same last bit.

    Args:
        folder: of the checkpoints, of which the newest stays. Processes that do the same work at the same time may
            share it, for all write equal states.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._due_at = time.monotonic() + SAVE_EVERY_SECONDS

    def newest(self, trainer: Trainer) -> Path | None:
        """The newest checkpoint that all processes find; None to begin with the first step."""
        found = Collective(rank=trainer.global_rank, world=trainer.world_size).gather_objects(
            {path.name for path in self.folder.glob(PATTERN) if _is_readable(path)}
        )
        names = set.intersection(*found)
        return self.folder / max(names) if names else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.strategy.broadcast(time.monotonic() >= self._due_at):  # clocks differ
            return
        begun, done = time.monotonic(), completed_rollouts(trainer)
        path = checkpoint_path(self.folder, done)
        try:
            trainer.save_checkpoint(path)
        except OSError as error:
            rank_zero_warn(f"checkpoint of the cold start not saved: {error.strerror or error} ({path}).")
            trainer.strategy.barrier()  # the one that ends save_checkpoint, where processes that write nothing wait
        if trainer.is_global_zero and path.exists():
            for other in self.folder.glob(PATTERN):
                if rollouts_of(other) < done:
                    with best_effort(other):
                        remove(other)
        now = time.monotonic()
        self._due_at = now + max(SAVE_EVERY_SECONDS, (now - begun) / LARGEST_SHARE)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        set_progress(checkpoint, completed_rollouts(trainer))

    def remove(self, trainer: Trainer) -> None:
        """Deletes the checkpoints, once the result is there."""
        if trainer.is_global_zero:
            shutil.rmtree(self.folder, ignore_errors=True)


def _is_readable(path: Path) -> bool:
    try:
        return path.is_dir() or bool(read_file(path, mmap=True))
    except CheckpointError:  # of a disk that failed
        return False
