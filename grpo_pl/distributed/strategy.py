"""Lightning's strategy for FSDP2, its plugin for checkpoints, and the processes that a launcher started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grpo_pl.distributed.sharding import Sharding
from grpo_pl.files.checkpoints import CheckpointError, read_file, save_tensors

Precision = Literal["float32", "bfloat16", "float16"]


def computed_in(precision: str, *, weights: str, sharded: str | None, device: str) -> str:
    """Name of the type in which the policy of a run computes.

    Args:
        precision: ``trainer.precision``.
        weights: type of the weights.
        sharded: ``param_dtype`` of `FSDP2Strategy`; None under another strategy.
        device: type of the devices, such as ``cuda``.
    """
    if sharded == "auto":
        sharded = "bfloat16" if device == "cuda" else "float32"
    if sharded not in (None, "float32"):
        return sharded
    return {"bf16-mixed": "bfloat16", "64-true": "float64"}.get(precision, weights)


def computed_by(trainer: Trainer, weights: str, *, whole: bool = False) -> str:
    """`computed_in`, under a Trainer; ``whole`` for what its strategy does not shard."""
    strategy = trainer.strategy
    sharded = strategy.param_dtype if isinstance(strategy, FSDP2Strategy) and not whole else None
    return computed_in(str(trainer.precision), weights=weights, sharded=sharded, device=strategy.root_device.type)


class CheckpointFiles(TorchCheckpointIO):
    """The Trainer's plugin that writes checkpoints atomically and reads them without running code that they contain.

    Args:
        shared: other runs may write the same files at the same time.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save_tensors(checkpoint, Path(path), shared=self.shared)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        from grpo_pl.files.sharded_checkpoints import read_checkpoint

        return read_checkpoint(Path(path))


WHOLE_ONLY = (
    "trainer.strategy: sharded_checkpoints writes whole checkpoints only: leave out save_weights_only, or set "
    "sharded_checkpoints to false."
)


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimiser state over all processes (ZeRO stage 3, arXiv:1910.02054).

    Runs on GPUs and, with gloo, on CPUs. Keep ``trainer.precision`` at ``32-true``: the weights that AdamW updates stay
    in float32, and computations use a copy of them in ``param_dtype``.

    Args:
        param_dtype: type of gathered parameters and of the computation, in rollout and update alike; ``auto`` is
            bfloat16 on GPUs and float32 on CPUs.
        reduce_dtype: type in which gradients are summed over processes.
        cpu_offload: keep parameters, gradients and optimiser state in main memory; slow, for models that fit no other
            way.
        defer_gradient_sync: sum gradients over processes once an optimiser step, not after every micro-batch: less
            traffic, but each process holds whole gradients meanwhile.
        sharded_checkpoints: every process writes its part into a folder; otherwise the first writes a single file,
            which needs the whole training state in its main memory.
        timeout_minutes: how long processes wait for each other before the run ends with an error.
    """

    def __init__(
        self,
        param_dtype: Precision | Literal["auto"] = "auto",
        reduce_dtype: Precision = "float32",
        cpu_offload: bool = False,
        defer_gradient_sync: bool = False,
        sharded_checkpoints: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(
            data_parallel_size=1,  # until the number of processes is known
            tensor_parallel_size=1,
            save_distributed_checkpoint=sharded_checkpoints,
            process_group_backend=None,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.param_dtype, self.reduce_dtype = param_dtype, getattr(torch, reduce_dtype)
        self.cpu_offload, self.defer_gradient_sync = cpu_offload, defer_gradient_sync
        self.sharded_checkpoints = sharded_checkpoints
        self.checkpoint_io = CheckpointFiles()

    @property
    def sharding(self) -> Sharding:
        """The settings with which ``GRPOModule.configure_model`` shards its models."""
        device = self.root_device.type
        name = computed_in("32-true", weights="float32", sharded=self.param_dtype, device=device)
        return Sharding(
            mesh=self.device_mesh["data_parallel"],
            param_dtype=None if name == "float32" else getattr(torch, name),
            reduce_dtype=self.reduce_dtype,
            cpu_offload=self.cpu_offload,
        )

    def _setup_distributed(self) -> None:
        if self.cpu_offload and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # gradients on the CPU are clipped there, over gloo
        super()._setup_distributed()
        self._data_parallel_size = self.world_size  # "auto" counts nodes

    def model_to_device(self) -> None:
        if not self.cpu_offload:
            super().model_to_device()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        from grpo_pl.files.sharded_checkpoints import by_first_process, write_sharded

        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, path)
            return
        if "optimizer_states" not in checkpoint:
            raise ValueError(WHOLE_ONLY)
        staging = path.with_name(path.name + ".partial")

        def empty() -> None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

        by_first_process(empty)
        (optimizer,) = checkpoint.pop("optimizer_states")
        tensors = {"state_dict": checkpoint.pop("state_dict"), "optimizer": optimizer["state"]}
        try:
            write_sharded(staging, tensors, {**checkpoint, "optimizer_param_groups": optimizer["param_groups"]})
        except OSError:
            by_first_process(lambda: shutil.rmtree(staging, ignore_errors=True))
            raise
        by_first_process(lambda: os.replace(staging, path))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        from grpo_pl.files.sharded_checkpoints import load_sharded

        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            read_file(path, mmap=True)  # refuses unusable files with our own message
            return super().load_checkpoint(path, weights_only=True)
        assert self.model is not None
        tensors: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        optimizer = self.optimizers[0] if self.optimizers else None
        if optimizer is not None:
            state: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer)
            tensors["optimizer"] = state["state"]
        meta = load_sharded(path, tensors)
        set_model_state_dict(self.model, tensors["state_dict"])
        if optimizer is not None:
            groups = meta["optimizer_param_groups"]
            names = [name for group in groups for name in group["params"]]
            if names != [name for group in state["param_groups"] for name in group["params"]]:
                raise CheckpointError(f"{path} holds the optimiser of another model.")
            set_optimizer_state_dict(self.model, optimizer, {"state": tensors["optimizer"], "param_groups": groups})
        return meta


def check_strategy(strategy: Strategy | str) -> None:
    """Refuses a strategy under which a run might train something else without a word, as each process of another
    tensor parallelism would draw prompts of its own; and one whose processes take the trained policy with them.

    Args:
        strategy: as a Trainer has it, or its name, before there is a Trainer.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    started_by = name.split("_") if isinstance(strategy, str) else [getattr(strategy, "_start_method", "")]
    if not {"spawn", "forkserver"}.isdisjoint(started_by):
        raise ValueError(
            f"trainer.strategy is {name}, whose processes are spawned and end with what they trained: set ddp in a "
            "script, or ddp_notebook in a notebook."
        )
    if isinstance(strategy, str):
        if not {"fork", "notebook"}.isdisjoint(started_by):
            raise ValueError(f"trainer.strategy is {name}, which is for notebooks: set ddp on the command line.")
        supported = strategy in ("auto", "ddp") or strategy.startswith("ddp_find_unused")
    else:
        supported = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | FSDP2Strategy)
    if not supported:
        raise ValueError(
            f"trainer.strategy is {name}, which is not supported: leave it out, or set ddp, "
            "grpo_pl.distributed.strategy.FSDP2Strategy (configs/strategy/fsdp.yaml), or a subclass of one."
        )


@contextmanager
def joining_gradients(strategy: Strategy, policy: nn.Module, *, last: bool) -> Iterator[None]:
    """Context manager of a backward pass: gradients of other processes join in the last micro-batch of an optimiser
    step, or, where whole gradients would take too much memory, in every one."""
    if isinstance(strategy, FSDP2Strategy):
        cast(FSDPModule, policy).set_requires_gradient_sync(last or not strategy.defer_gradient_sync)
    wrapped = strategy.model
    with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
        yield


def launched_devices() -> tuple[int, int]:
    """(processes per node, nodes) as started by torchrun or SLURM; (1, 1) without a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return 1, 1
