"""``ChildEngine``: base class of engines that draw in a child process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor

from grpo_pl.extras.engines.child.engine_process import EngineProcess
from grpo_pl.extras.engines.copy_engine import CopyEngine, ModelSpec, WeightsVersion
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rollout.engine import Watching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.extras.agents.episodes import AnyRequest, EngineOutput


@dataclass(kw_only=True)
class ChildEngine(CopyEngine):
    """Draws in a process of its own, one for each rank, which starts with the first rollout, and again if it ends."""

    worker: ClassVar[str]
    """``module:Class`` of the `grpo_pl.extras.engines.child.main.Worker` that the process runs."""
    threads: int | None = None
    """CPU threads of the process; null takes as many as this one has, or half of them where both work at once."""
    _child: EngineProcess | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_at_least(1, "model.engine", threads=self.threads)

    @abstractmethod
    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        """Arguments of the worker."""

    def environment(self, policy: ModelSpec) -> dict[str, str]:
        """Variables that the process gets besides those of this one."""
        return {"OMP_NUM_THREADS": str(self.threads or torch.get_num_threads())}

    def unclaimed_bytes(self, model: PreTrainedModel) -> int:
        policy = ModelSpec.of(model)
        if policy.device.type != "cuda" or self.pid is not None:
            return 0
        dtype = getattr(torch, getattr(self, "dtype", None) or str(policy.dtype).removeprefix("torch."))
        return (self.memory_bytes or 0) + policy.parameters * int(dtype.itemsize)

    def describe(self) -> str:
        return f"{type(self).__name__} in a process of its own, the policy's weights pushed {self.pushes} times"

    @property
    def pid(self) -> int | None:
        """The child process, while there is one."""
        return None if self._child is None or self._child.closed else self._child.pid

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None
        super().close()

    def _push_weights(
        self, policy: ModelSpec, version: WeightsVersion, weights: Iterator[tuple[str, Tensor]], *, collective: bool
    ) -> None:
        if self._child is None or self._child.closed:
            self.check()
            settings, environment = self.settings(policy), self.environment(policy)
            if policy.device.type == "cuda":
                torch.cuda.empty_cache()  # what lies unused in this process's cache is not free for another
            self._child = EngineProcess(self.worker, settings, environment, watch=self._check_stop)
        self._child.load(weights, watch=self._check_stop)

    def _draw(self, request: AnyRequest, **watching: Unpack[Watching]) -> EngineOutput:
        assert self._child is not None
        return self._child.ask("generate", request, **watching), []

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts a process of its own."""
        return {**super().__getstate__(), "_child": None}
