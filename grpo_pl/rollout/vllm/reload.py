"""An extension of vLLM's worker that takes new weights, including those that it has packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Reload:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def take_weights(self: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every weight of the model anew. On CPUs layers compute with packed copies, two kinds of which vLLM's own
        reload leaves old: those of experts, which it packs with their kernel, and of a head that is tied to the
        embedding, which is not loaded itself."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        modules = list(self.get_model().modules())
        on_cpu = self.device.type == "cpu"
        for module in modules:
            if on_cpu and getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # so that it is made again
        self.reload_weights(weights_iterator=weights)
        for module in modules:
            if on_cpu and isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
