"""What vLLM's worker learns from us: to take new weights, those that it packed or that are tied included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Reload:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def take_weights(self: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.reload_weights(weights_iterator=weights)
        # On CPUs a head keeps a packed copy of its weight. One that is tied to the embedding is not loaded itself, so
        # vLLM would not pack it again.
        for module in self.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
