"""``CopyEngine``: an engine that draws from a copy of the weights; decides when to push new ones, and replaces a copy
that is lost."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from grpo_pl.policy.inputs import InputReading, reading_of
from grpo_pl.policy.library_internals import computing_dtype, unwrap
from grpo_pl.policy.quantization import plain_config
from grpo_pl.policy.weights import checkpoint_weights, is_sharded
from grpo_pl.rollout.engine import EngineDied, RolloutEngine, RolloutInterrupted, Watching
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig, PreTrainedModel

    from grpo_pl.extras.agents.episodes import AnyRequest, EngineOutput

log = logging.getLogger(__name__)

WeightsVersion = tuple[int, int]
"""Names the weights of one push: updates that the policy had had, and calls of ``update_weights`` so far. That of a
later push is greater."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A policy without its weights, from which an engine's worker is started, here or on another host."""

    config: PreTrainedConfig
    """Of the model itself, without what is wrapped around it; names its architecture."""
    dtype: torch.dtype
    """Type in which the policy computes; that of its weights may be wider."""
    device: torch.device
    """Device on which the engine computes."""
    parameters: int
    """Number of them."""
    adapters: PeftConfig | None = None
    """Of its LoRA adapters, which an engine has of its own, or gets merged into the weights."""
    reading: InputReading | None = None
    """Of what it reads beside the tokens of prompts."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        base = unwrap(model)
        config = plain_config(base.config)
        # the class that transformers knows; FSDP2 makes one of its own of it
        kinds = (kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers."))
        config.architectures = [next(kinds)]
        return cls(
            config=config,
            dtype=computing_dtype(base),
            device=model.device,
            parameters=base.num_parameters(),
            adapters=getattr(base, "peft_config", {}).get("default"),
            reading=reading_of(base),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A policy at one moment, in the memory of this process: all that an engine needs to draw from it."""

    version: WeightsVersion
    weights: Sequence[tuple[str, Tensor]]
    """As checkpoints name them, whole and on the CPU."""
    policy: ModelSpec


@dataclass(kw_only=True)
class CopyEngine(RolloutEngine):
    """Gives its copy the policy's weights before a rollout if there are new ones.

    If the copy is lost in the middle of a rollout, the weights are pushed again and the rollout is drawn again: keys
    give the same samples. A second loss in one rollout ends the run.
    """

    copies_weights: ClassVar[bool] = True
    merges_adapters: ClassVar[bool] = True
    """False where the copy has LoRA adapters of its own; merged into weights of few bits small ones are lost."""
    pushes: int = field(default=0, init=False, compare=False)
    """Number of pushes so far."""
    weights_version: int | None = field(default=0, init=False, compare=False)
    _update_calls: int = field(default=0, init=False, repr=False, compare=False)
    _snapshot: Snapshot | None = field(default=None, init=False, repr=False, compare=False)  # drawn from, if any
    _latest: Snapshot | None = field(default=None, init=False, repr=False, compare=False)
    _pushed: int | Snapshot | None = field(default=None, init=False, repr=False, compare=False)
    # what the copy holds: a snapshot, or the policy as it was after so many update calls
    _should_stop: Callable[[], bool] | None = field(default=None, init=False, repr=False, compare=False)
    # asked while the copy is started or takes weights

    @abstractmethod
    def _push_weights(
        self, policy: ModelSpec, version: WeightsVersion, weights: Iterator[tuple[str, Tensor]], *, collective: bool
    ) -> None:
        """Gives the copy new weights, and starts it if it does not run.

        Args:
            version: alike on all ranks.
            collective: ``weights`` are those of a sharded policy, which all ranks gather and must read to the end.
        """

    @abstractmethod
    def _draw(self, request: AnyRequest, **watching: Unpack[Watching]) -> EngineOutput:
        """Draws from the weights of the last push; episodes only where the engine has a ``play``."""

    def update_weights(self, model: PreTrainedModel) -> None:
        self._update_calls += 1

    def prepare(self, model: PreTrainedModel) -> None:
        if self._stale and is_sharded(model):  # later, ranks make different numbers of calls, and some may fail before
            self._push(model)

    def snapshot(self, model: PreTrainedModel) -> Snapshot:
        """The policy as it is now, for `use`; all ranks call it together."""
        version = (self.updates, self._update_calls)
        if self._latest is None or self._latest.version[1] != self._update_calls:
            self._latest = None  # so that memory need not hold both
            policy = ModelSpec.of(model)
            weights = [(name, weight.to("cpu", copy=True)) for name, weight in self._weights(model, policy)]
            self._latest = Snapshot(version=version, weights=weights, policy=policy)
        return self._latest

    def use(self, snapshot: Snapshot | None) -> None:
        """Draws from a snapshot until told otherwise, also after the copy was started again; None draws from the policy
        as it is. Another thread may call this and `generate` while no other calls `generate`."""
        self._snapshot = snapshot

    @property
    def _stale(self) -> bool:
        """True if a push is due; the same on all ranks, unless a copy is lost."""
        return self._pushed != (self._update_calls if self._snapshot is None else self._snapshot)

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        return self._with_weights(model, request, **watching)[0]

    def _with_weights(self, model: PreTrainedModel, request: AnyRequest, **watching: Unpack[Watching]) -> EngineOutput:
        """Draws once the copy has the weights, and again if it is lost meanwhile."""
        should_stop = watching.get("should_stop")
        for first in (True, False):
            self._should_stop = should_stop
            try:
                if self._stale:
                    self._push(model)
                rollout, episodes = self._draw(request, **watching)
                break
            except EngineDied as death:
                self._pushed = None
                if death.final:
                    raise
                if should_stop is not None and should_stop():
                    raise RolloutInterrupted from death
                log.warning("%s", death)
                collective = self._snapshot is None and is_sharded(model)  # then only all ranks can push again
                if not first or collective:
                    raise
                log.warning("It gets the weights again, and the rollout is drawn again.")
            finally:
                self._should_stop = None
        return rollout.to(model.device), episodes

    def _check_stop(self) -> None:
        """Raises `RolloutInterrupted` once the caller of `generate` wants it to stop."""
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted

    def kill(self) -> None:
        """Ends the copy while another thread waits for it, which finds it dead."""

    def close(self) -> None:
        self._pushed = self._latest = None

    def _weights(self, model: PreTrainedModel, policy: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(model, merge=self.merges_adapters or policy.adapters is None)

    def _push(self, model: PreTrainedModel) -> None:
        source = self._snapshot
        collective = source is None and is_sharded(model)
        policy = ModelSpec.of(model) if source is None else source.policy
        weights = self._weights(model, policy) if source is None else iter(source.weights)
        version = (self.updates, self._update_calls) if source is None else source.version
        try:
            self._push_weights(policy, version, weights, collective=collective)
        except Exception:
            for _ in weights if collective else ():  # the other ranks gather them
                pass
            raise
        self._pushed, self.pushes = version[1] if source is None else source, self.pushes + 1
        self.weights_version = version[0]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of this object has none of the weights."""
        return {**vars(self), "_snapshot": None, "_latest": None, "_pushed": None, "_should_stop": None}
