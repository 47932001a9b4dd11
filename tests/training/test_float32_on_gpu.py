"""A run on a GPU that computes in float32 is told so before it starts."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.training.checks import warn_of_float32_on_gpu

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SHAPE = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("dtype", "trainer", "warned"),
    [
        ("float32", {}, True),
        ("auto", {}, True),  # as the shape from scratch says nothing else
        ("float32", {"precision": "bf16-mixed"}, False),
        ("bfloat16", {}, False),
        ("float32", {"strategy": FSDP2Strategy()}, False),
        ("float32", {"strategy": FSDP2Strategy(param_dtype="bfloat16")}, False),
        ("float32", {"strategy": FSDP2Strategy(param_dtype="float32")}, True),  # a written type keeps its meaning
        ("bfloat16", {"strategy": FSDP2Strategy(param_dtype="float32")}, False),
        ("float32", {"accelerator": "cpu"}, False),
    ],
)
def test_a_run_that_computes_in_float32_on_a_gpu_is_told_so(
    dtype: Any, trainer: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Trainer of a machine that says it has one GPU, which needs none until it is started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    made = Trainer(**{**QUIET, "accelerator": "gpu", "devices": 1, **trainer})
    with pytest.warns(UserWarning, match="float32.*D45") if warned else nullcontext():
        warn_of_float32_on_gpu(made, PolicyConfig(from_scratch={**SHAPE, "num_attention_heads": 2}, dtype=dtype))
