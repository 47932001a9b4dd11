"""``CopyEngine``: what engines that draw from a copy of the weights share: when it gets new ones, and its loss."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.policy.weights import checkpoint_weights, is_sharded
from grpo_pl.rollout.child.outline import Outline
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutEngine, RolloutInterrupted
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.rollout.episodes import EngineOutput

log = logging.getLogger(__name__)

Mark = tuple[int, int]
"""Names the weights of one push; that of a later push is greater."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A policy at one moment, in the memory of this process: all that an engine needs to draw from it."""

    version: int
    """Updates that the policy had had."""
    heard: int
    """Updates that the engine had heard of."""
    weights: Sequence[tuple[str, Tensor]]
    """As checkpoints name them, whole and on the CPU."""
    policy: Outline


@dataclass(kw_only=True)
class CopyEngine(RolloutEngine):
    """Gives its copy the policy's weights before a rollout where there are new ones.

    If what draws ends in the middle of a rollout, the weights are pushed again and the rollout is drawn again: keys
    give the same samples. A second end in one rollout ends the run.
    """

    pushes: int = field(default=0, init=False, compare=False)
    """How many times weights were given to the copy."""
    weights_version: int | None = field(default=0, init=False, compare=False)
    _heard: int = field(default=0, init=False, repr=False, compare=False)  # updates
    _snapshot: Snapshot | None = field(default=None, init=False, repr=False, compare=False)  # drawn from, if any
    _taken: Snapshot | None = field(default=None, init=False, repr=False, compare=False)  # the newest one
    _holds: int | Snapshot | None = field(default=None, init=False, repr=False, compare=False)  # what was pushed last
    _should_stop: Callable[[], bool] | None = field(default=None, init=False, repr=False, compare=False)
    # asked while what draws is started, or takes weights

    @abstractmethod
    def _give(self, policy: Outline, mark: Mark, weights: Iterator[tuple[str, Tensor]], *, together: bool) -> None:
        """Has what draws take new weights, and starts it where it is not there.

        Args:
            mark: names these weights among all of this engine's, alike on all ranks; grows from push to push.
            together: all ranks gather ``weights``, those of a sharded policy, and must read them all.
        """

    @abstractmethod
    def _ask(
        self, request: GenerateRequest, progress: ProgressFn | None, should_stop: Callable[[], bool] | None
    ) -> Rollout:
        """Draws from the weights that were given last."""

    def update_weights(self, model: PreTrainedModel) -> None:
        self._heard += 1

    def prepare(self, model: PreTrainedModel) -> None:
        if self._stale and is_sharded(model):  # later, ranks make different numbers of calls, and some may fail before
            self._push(model)

    def snapshot(self, model: PreTrainedModel) -> Snapshot:
        """The policy as it is now, for `use`; all ranks call it together."""
        if self._taken is None or self._taken.heard != self._heard:
            self._taken = None
            weights = [(name, weight.to("cpu", copy=True)) for name, weight in checkpoint_weights(model)]
            self._taken = Snapshot(version=self.updates, heard=self._heard, weights=weights, policy=Outline.of(model))
        return self._taken

    def use(self, snapshot: Snapshot | None) -> None:
        """Draws from a snapshot until told otherwise, also where what draws is started again; None draws from the
        policy as it is. Another thread may call this and `generate` while no other calls `generate`."""
        self._snapshot = snapshot

    @property
    def _stale(self) -> bool:
        """The same on all ranks, unless a copy is lost."""
        return self._holds != (self._heard if self._snapshot is None else self._snapshot)

    def generate(
        self,
        model: PreTrainedModel,
        request: GenerateRequest,
        *,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        return self._from_copy(model, lambda: (self._ask(request, progress, should_stop), []), should_stop)[0]

    def _from_copy(
        self, model: PreTrainedModel, ask: Callable[[], EngineOutput], should_stop: Callable[[], bool] | None
    ) -> EngineOutput:
        """What ``ask`` draws once the copy has the weights; asked again after a death."""
        for first in (True, False):
            self._should_stop = should_stop
            try:
                if self._stale:
                    self._push(model)
                rollout, episodes = ask()
                break
            except EngineDied as death:
                self._holds = None
                if death.final:
                    raise
                if should_stop is not None and should_stop():
                    raise RolloutInterrupted from death
                log.warning("%s", death)
                together = self._snapshot is None and is_sharded(model)  # then only all ranks can push again
                if not first or together:
                    raise
                log.warning("It gets the weights again, and the rollout is drawn again.")
            finally:
                self._should_stop = None
        tensors: dict[str, Any] = {n: v.to(model.device) for n, v in vars(rollout).items() if torch.is_tensor(v)}
        return replace(rollout, **tensors), episodes

    def _watch(self) -> None:
        """Raises `RolloutInterrupted` once the caller of `generate` wants it to stop."""
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted

    def kill(self) -> None:
        """Ends what draws while another thread waits for it, which finds it dead."""

    def close(self) -> None:
        self._holds = self._taken = None

    def _push(self, model: PreTrainedModel) -> None:
        source, heard, version = self._snapshot, self._heard, self.updates
        weights = checkpoint_weights(model)
        if source is not None:
            heard, version, weights = source.heard, source.version, iter(source.weights)
        together = source is None and is_sharded(model)
        try:
            policy = Outline.of(model) if source is None else source.policy
            self._give(policy, (version, heard), weights, together=together)
        except Exception:
            if together:
                for _ in weights:  # the other ranks gather them
                    pass
            raise
        self._holds, self.pushes = heard if source is None else source, self.pushes + 1
        self.weights_version = version

    def __getstate__(self) -> dict[str, Any]:
        """A copy of this object has none of the weights."""
        return {**vars(self), "_snapshot": None, "_taken": None, "_holds": None, "_should_stop": None}
