"""A run whose rollouts ran out of memory goes on with fewer completions at once, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.native import llama_family
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams

SHAPE = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
MORE = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


class AfterOne(Callback):
    """Saves what the first rollout leaves."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Trainer, *more: Any) -> None:
        if not self.file.exists():
            trainer.save_checkpoint(self.file)


def _fit(file: Path, resume: Path | None = None) -> None:
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={**SHAPE, **MORE}),
        rewards=[ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=4),
        sampling=SamplingParams(max_completion_length=6),
    )
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"callbacks": [AfterOne(file)], "limit_val_batches": 0, "inference_mode": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, **quiet)
    data = RolloutDataModule(ArithmeticPrompts(digits=1), steps=2, prompts_per_step=2, val_prompts=2)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)


def test_the_number_is_in_the_checkpoint_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_PL_NATIVE", "torch")
    started: list[int] = []

    class Short(llama_family.LlamaFamilyDecoder):
        def start(self, prompt_ids: Any, prompt_mask: Any, owners: Any, *, room: int) -> Any:
            started.append(len(owners))
            if len(owners) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().start(prompt_ids, prompt_mask, owners, room=room)

    monkeypatch.setattr(llama_family, "LlamaFamilyDecoder", Short)
    _fit(tmp_path / "first.ckpt")
    assert started == [8, 4, *[2] * 8]
    assert read_checkpoint(tmp_path / "first.ckpt")["engine"] == {"configured": 0, "rows": 2}
    started.clear()
    _fit(tmp_path / "second.ckpt", resume=tmp_path / "first.ckpt")
    assert started == [2] * 4
