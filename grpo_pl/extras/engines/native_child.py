"""``NativeChildEngine``: the native engine in a child process, so that rollouts and updates can overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from grpo_pl.extras.engines.child.engine import ChildEngine
from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.inputs import InputReading, auto_class
from grpo_pl.policy.weights import from_weights, lacking, load_whole
from grpo_pl.rollout.engine import ProgressFn
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(kw_only=True)
class NativeChildEngine(ChildEngine):
    """`NativeEngine` in a process of its own on the policy's device: the same samples, to the bit where both compute
    with one number of threads. Any model of transformers will do; those outside the Llama family run on ``generate``.
    """

    native: ClassVar[bool] = True
    worker: ClassVar[str] = "grpo_pl.extras.engines.native_child:NativeWorker"
    supports_top_logprobs: ClassVar[bool] = True  # type: ignore[misc]
    supports_inputs: ClassVar[bool] = True  # type: ignore[misc]
    merges_adapters: ClassVar[bool] = False
    max_batch_rows: int = 0
    """Most completions decoded at once; 0 takes all of them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the engine's weights and computation; null takes the one in which the policy computes."""
    decoder: str | None = field(default=None, init=False, compare=False)
    """As in `NativeEngine`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, "model.engine", max_batch_rows=self.max_batch_rows)

    @property
    def memory_bytes(self) -> int:  # type: ignore[override]
        """The process with its libraries, measured; keys and values of a rollout come on top while it is drawn."""
        return 2**29

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        return {
            "config": policy.config.to_dict(),
            "adapters": policy.adapters,
            "reading": policy.reading,
            "dtype": self.dtype or str(policy.dtype).removeprefix("torch."),
            "device": str(policy.device),
            "max_batch_rows": self.max_batch_rows,
            "decoder": self.decoder,
        }


class NativeWorker:
    """A model of the policy's architecture, and the native engine that reads it."""

    def __init__(
        self,
        *,
        config: dict[str, Any],
        dtype: str,
        device: str,
        max_batch_rows: int,
        decoder: str | None = None,
        adapters: PeftConfig | None = None,
        reading: InputReading | None = None,
    ) -> None:
        from transformers import AutoConfig

        self._settings = {"config": AutoConfig.for_model(**config), "dtype": getattr(torch, dtype)}
        self._device = torch.device(device)
        self.model = auto_class(images=reading is not None).from_config(**self._settings, trust_remote_code=False)
        self._reading = reading
        if reading is not None:
            reading.prepare(self.model)
        if adapters is not None:
            self.model.add_adapter(adapters)
        self.model.to(self._device)
        self.engine = NativeEngine(max_batch_rows=max_batch_rows)
        self.engine.decoder = decoder

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        whole = dict(weights)
        if lacking(self.model, whole):  # a model that keeps fused what its checkpoints hold apart
            copies = {name: weight.clone() for name, weight in whole.items()}  # which it keeps
            loaded = from_weights(type(self.model), copies, **self._settings)
            if self._reading is not None:
                self._reading.prepare(loaded)
            self.model = loaded.to(self._device)
        else:
            load_whole(self.model, whole)

    def generate(self, request: GenerateRequest, *, progress: ProgressFn, should_stop: Callable[[], bool]) -> Rollout:
        return self.engine.generate(self.model, request, progress=progress, should_stop=should_stop).to("cpu")
