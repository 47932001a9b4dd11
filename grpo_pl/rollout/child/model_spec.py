"""``ModelSpec``: a policy without its weights, from which an engine's worker is started, here or on another host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from grpo_pl.policy.library_internals import unwrap
from grpo_pl.policy.quantization import plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture, type and device of a policy."""

    config: PreTrainedConfig
    """Of the model itself, without what is wrapped around it; names its architecture."""
    dtype: torch.dtype
    """Type of the weights."""
    device: torch.device
    """Device on which the engine computes."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        base = unwrap(model)
        config = plain_config(base.config)
        # the class that transformers knows; FSDP2 makes one of its own of it
        kinds = (kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers."))
        config.architectures = [next(kinds)]
        return cls(config=config, dtype=model.dtype, device=model.device)
