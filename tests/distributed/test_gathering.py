"""Two ranks that share a policy hold all of its weights while the engine draws, and at no other time."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.tensor import DTensor

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.native import llama_family
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training import collect
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams
from tests.distributed.conftest import fork, join

SHAPE = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MORE = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


def _run(folder: Path) -> None:
    seen: list[tuple[str, bool, int]] = []
    decoders = weakref.WeakSet[Any]()
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={**SHAPE, **MORE}),
        rewards=[ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=2, beta=0.1),
        sampling=SamplingParams(max_completion_length=6),
    )
    module.engine.decoder = "torch"

    def watched(stage: str, run: Any) -> Any:
        def look(*arguments: Any, **options: Any) -> Any:
            gc.collect()
            sharded = all(isinstance(weight, DTensor) for weight in module.require_policy().parameters())
            seen.append((stage, sharded, len(decoders)))
            return run(*arguments, **options)

        return look

    class Decoder(llama_family.LlamaFamilyDecoder):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            decoders.add(self)

    llama_family.LlamaFamilyDecoder = Decoder  # type: ignore[misc]
    NativeEngine.generate = watched("draw", NativeEngine.generate)  # type: ignore[method-assign]
    collect.score_completions = watched("reward", collect.score_completions)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=FSDP2Strategy(), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, inference_mode=False, use_distributed_sampler=False,
        max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, RolloutDataModule(ArithmeticPrompts(digits=1), steps=2, prompts_per_step=2, val_prompts=2))
    (folder / f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))


def test_rewards_are_computed_beside_no_gathered_weights(tmp_path: Path) -> None:
    ended = join(fork(_run, tmp_path, folder=tmp_path, world=2), tmp_path)
    assert ended.status == [0, 0], ended.log(0)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert {stage for stage, *_ in seen} == {"draw", "reward"}
        assert all(sharded == (stage == "reward") and not left for stage, sharded, left in seen), seen
