"""A second Trainer inside of a fit: what it takes over, and what it leaves as it was."""

import signal
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from grpo_pl.distributed.second_trainer import fit_beside
from grpo_pl.distributed.strategy import FSDP2Strategy
from tests.distributed.conftest import Calls

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Numbers(LightningDataModule):
    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader([1.0, 2.0])  # type: ignore[arg-type]


class Weight(LightningModule):
    """Of which a further one may be fitted before the first batch."""

    def __init__(self, within: LightningModule | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)
        self.within = [] if within is None else [within]  # no submodule
        self.computed_in: set[torch.dtype] = set()

    def setup(self, stage: str) -> None:
        for other in self.within:
            fit_beside(self.trainer, other, Numbers())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self.weight(batch[:, None].float())
        self.computed_in.add(out.dtype)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hears(Callback):
    def __init__(self) -> None:
        self.heard: list[LightningModule] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.heard.append(pl_module)


def test_it_trains_before_the_first_one_whose_callbacks_do_not_hear_of_it() -> None:
    within, hears = Weight(), Hears()
    outer, before = Weight(within), [weight.clone() for weight in within.parameters()]
    trainer = Trainer(**QUIET, callbacks=[hears], precision="bf16-mixed")
    trainer.fit(outer, Numbers())
    assert hears.heard == [outer] and trainer.global_step == 2
    assert within.trainer is not trainer and within.trainer.global_step == 2
    assert within.computed_in == outer.computed_in == {torch.bfloat16}
    assert all(not torch.equal(old, new) for old, new in zip(before, within.parameters(), strict=True))


def test_signals_are_handled_as_before_and_ctrl_c_is_heard_outside() -> None:
    handlers = []

    class Stopped(Weight):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            handlers.append(signal.getsignal(signal.SIGTERM))
            signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(KeyboardInterrupt):
            fit_beside(Trainer(**QUIET), Stopped(), Numbers())
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
    assert handlers == [before[signal.SIGTERM]]


@pytest.mark.parametrize(("strategy", "whole"), [("ddp", False), ("fsdp", True)])
def test_it_shares_the_processes(on_two_ranks: Calls, strategy: str, whole: bool) -> None:
    def work(collective: Any) -> tuple[type, bool, int, float]:
        module = Weight()
        kind: Any = DDPStrategy(find_unused_parameters=True) if strategy == "ddp" else FSDP2Strategy()
        first = Trainer(**QUIET, devices=2, strategy=kind, use_distributed_sampler=False)
        fit_beside(first, module, Numbers(), whole=whole)
        second = module.trainer.strategy
        assert isinstance(second, DDPStrategy)
        found = bool(second._ddp_kwargs.get("find_unused_parameters"))
        return type(second), found, module.trainer.world_size, float(module.weight.weight)

    one, other = on_two_ranks(work)
    assert one == other
    assert one[:3] == (DDPStrategy, strategy == "ddp", 2)
