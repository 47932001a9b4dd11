"""``ChildEngine``: what engines in a child process share: pushing weights, asking, and going on after its death."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grpo_pl.policy.stop_strings import StopStrings
from grpo_pl.policy.weights import checkpoint_weights, is_sharded
from grpo_pl.rollout.child.process import ChildProcess
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutEngine, check_request
from grpo_pl.types import Rollout, SampleKey, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ChildEngine(RolloutEngine):
    """Draws in a process of its own, one for each rank, from a copy of the weights.

    The process starts with the first rollout. If it ends in the middle of one, another is started, the weights are
    pushed again and the rollout is drawn again: keys give the same samples. A second death in one rollout ends the run.
    """

    worker: ClassVar[str]
    """``module:Class`` of the `grpo_pl.rollout.child.main.Worker` that the process runs."""
    pushes: int = field(default=0, init=False, compare=False)
    """How many times weights were given to the process."""
    weights_version: int | None = field(default=0, init=False, compare=False)
    _updates: int = field(default=0, init=False, repr=False, compare=False)
    _child: ChildProcess | None = field(default=None, init=False, repr=False, compare=False)
    _stale: bool = field(default=True, init=False, repr=False, compare=False)  # the same on all ranks

    @abstractmethod
    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the worker."""

    def environment(self, model: PreTrainedModel) -> dict[str, str]:
        """Variables that the process gets besides those of this one."""
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    def update_weights(self, model: PreTrainedModel) -> None:
        self._updates += 1
        self._stale = True

    def prepare(self, model: PreTrainedModel) -> None:
        if self._stale and is_sharded(model):  # later, ranks make different numbers of calls, and some may fail before
            self._push(model)

    def generate(
        self,
        model: PreTrainedModel,
        *,
        prompt_ids: Sequence[Sequence[int]],
        keys: Sequence[Sequence[SampleKey]],
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
        stops: StopStrings | None = None,
    ) -> Rollout:
        check_request(prompt_ids, keys)
        request = {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "keys": keys,
            "sampling": sampling,
            "eos_token_ids": list(eos_token_ids),
            "pad_token_id": pad_token_id,
            "stops": stops,
        }
        for first in (True, False):
            try:
                if self._stale:
                    self._push(model)
                rollout = self._ask(request, progress, should_stop)
                break
            except EngineDied as death:
                self._stale = True
                log.warning("%s", death)
                if not first or is_sharded(model):  # whose weights only all ranks together can push again
                    raise
                log.warning("It is started again, and the rollout drawn again.")
        tensors: dict[str, Any] = {n: v.to(model.device) for n, v in vars(rollout).items() if torch.is_tensor(v)}
        return replace(rollout, **tensors)

    @property
    def pid(self) -> int | None:
        """The child process, while there is one."""
        return None if self._child is None or self._child.closed else self._child.pid

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child, self._stale = None, True

    def _ask(
        self, request: dict[str, Any], progress: ProgressFn | None, should_stop: Callable[[], bool] | None
    ) -> Rollout:
        assert self._child is not None
        rollout: Rollout = self._child.ask("generate", request, progress=progress, should_stop=should_stop)
        return rollout

    def _push(self, model: PreTrainedModel) -> None:
        weights = checkpoint_weights(model)
        try:
            if self._child is None or self._child.closed:
                self.check()
                self._child = ChildProcess(self.worker, self.settings(model), self.environment(model))
            self._child.load(weights)
        except Exception:
            if is_sharded(model):
                for _ in weights:  # the other ranks gather them
                    pass
            raise
        self._stale, self.pushes, self.weights_version = False, self.pushes + 1, self._updates

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts a process of its own."""
        return {**vars(self), "_child": None, "_stale": True}
