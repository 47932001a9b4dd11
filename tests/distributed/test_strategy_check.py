"""A strategy of two processes that nobody has tested is held to one process, by both of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduced
from lightning.pytorch.strategies import ParallelStrategy

from tests.distributed.conftest import Calls, grpo_pl

CHECKED = """
trainer: {{strategy: {{class_path: tests.distributed.test_strategy_check.{name}}}, devices: 2, limit_val_batches: 0}}
model: {{strategy_checked: true}}
data: {{steps: 2}}
"""
FAULT = r"trainer\.strategy is Apart, under which the first rollout was not that of one process: "


class Averaged(ParallelStrategy):
    """A user's own of processes that average their gradients; it extends none of those that are tested."""

    def setup_environment(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        dist.init_process_group("gloo")

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    def model_to_device(self) -> None: ...

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        assert self.model is not None
        for weight in self.model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad, dist.ReduceOp.AVG)

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduced(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor


class Apart(Averaged):
    """Each process follows the gradient of its own completions."""

    def post_backward(self, closure_loss: torch.Tensor) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Averaged", "Apart"])
def test_two_processes_are_held_to_one(start: Calls, five_rollouts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "checked.yaml").write_text(CHECKED.format(name=name))
    flags = [f"--config={five_rollouts}", f"--config={tmp_path / 'checked.yaml'}"]
    _, finish = start(grpo_pl, tmp_path / "runs", "fit", *flags)
    ended = finish()
    for rank in range(2):
        if name == "Averaged":
            assert ended.status[rank] == 0, ended.log(rank)
        else:
            assert ended.status[rank] != 0
            assert re.search(f"{FAULT}the gradient's norm is [0-9.]+, and", ended.log(rank)), ended.log(rank)
