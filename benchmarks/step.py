"""Compares a whole GRPO step, rollout to optimiser, with TRL's ``GRPOTrainer`` on the same batch, in one process.

A Lightning run makes our steps; after each step, outside its timing, every arm of TRL makes one. Both sides draw 64
completions with the same lengths, score them with the same reward, compute entropy and make one AdamW step in the same
type; neither has a reference model.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    EOS,
    HALF_BILLION,
    MEDIUM,
    SMALL,
    Cell,
    ScriptedLengths,
    describe,
    lengths_of,
    publish,
    ratio,
    summary,
    surroundings,
    synchronise,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from rollout import ScriptedNative
from transformers import LogitsProcessorList, PrinterCallback, TrainerCallback

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import Problem, SamplingParams

PRECISION = {"float32": "32-true", "bfloat16": "bf16-true"}


@dataclass(kw_only=True)
class Letters(PromptSource):
    """Prompts of random letters; each letter is a token."""

    length: int

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        generator = torch.Generator().manual_seed(7919 * step + attempt)
        codes = torch.randint(97, 123, (count, self.length), generator=generator).tolist()
        return [Problem(id=step * count + i, question="".join(map(chr, row)), answer="") for i, row in enumerate(codes)]

    def validation(self, count: int | None = None) -> list[Problem]:
        return self.prompts(0, count=1)


@dataclass(kw_only=True)
class Checksum(Reward):
    """A cheap reward in [0, 1) that differs between completions; ``equal_share`` of the groups get the same value."""

    name: str = "checksum"
    correctness: bool = True
    equal_share: float = 0.0

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        prompts = list(dict.fromkeys(columns["prompt"]))
        equal = set(prompts[: round(self.equal_share * len(prompts))])
        values = [
            0.0 if prompt in equal else checksum(text)
            for prompt, text in zip(columns["prompt"], completions, strict=True)
        ]
        return [Score(value, "ok" if value == 1.0 else "wrong") for value in values]


def checksum(text: str) -> float:
    return zlib.crc32(text.encode()) % 1000 / 1000


class Ours(Callback):
    """Times our steps, and runs one step of each peer after each of them."""

    def __init__(self, peers: Mapping[str, TrlArm], warmup: int) -> None:
        self.peers, self.warmup = peers, warmup
        self.seconds: list[float] = []
        self.stages: list[dict[str, float]] = []
        self.theirs: dict[str, list[float]] = {name: [] for name in peers}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        synchronise(module.device.type)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        synchronise(module.device.type)
        seconds = time.perf_counter() - self._start
        theirs = {name: peer.step() for name, peer in self.peers.items()}
        if batch_idx < self.warmup:
            return
        self.seconds.append(seconds)
        names = ("time/rollout", "time/reward", "time/logprobs", "time/backward", "time/optimizer")
        self.stages.append({name: float(trainer.callback_metrics[name]) for name in names})
        for name, value in theirs.items():
            self.theirs[name].append(value)


def our_steps(
    cell: Cell,
    lengths: Sequence[int],
    *,
    device: str,
    steps: int,
    peers: Mapping[str, TrlArm],
    equal_share: float = 0.0,
    skip: bool = True,
) -> Ours:
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2", **scratch(cell)}, dtype=cell.dtype),  # type: ignore[arg-type]
        rewards=[Checksum(equal_share=equal_share)],
        algorithm=GRPOAlgorithm(group_size=cell.group, beta=0.0, skip_zero_advantage=skip),
        engine=ScriptedNative(lengths=lengths),
        sampling=SamplingParams(max_completion_length=cell.completion_tokens),
        optimization=Optimization(lr=1e-6),
    )
    data = RolloutDataModule(source=Letters(length=cell.prompt_tokens), steps=steps, prompts_per_step=cell.prompts)
    watch = Ours(peers, warmup=1)
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=PRECISION[cell.dtype],  # type: ignore[arg-type]
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
    )
    trainer.fit(module, data)
    return watch


def scratch(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell.config().items() if not name.endswith("token_id")}


class TrlArm:
    """TRL's trainer, one optimiser step at a time."""

    def __init__(self, cell: Cell, lengths: Sequence[int], device: str, folder: str, **options: Any) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.seconds = 0.0
        prompts = Letters(length=cell.prompt_tokens).prompts(0, count=cell.prompts)
        config = GRPOConfig(
            output_dir=folder,
            generation_batch_size=cell.rows,
            gradient_accumulation_steps=cell.rows // options["per_device_train_batch_size"],
            num_generations=cell.group,
            max_completion_length=cell.completion_tokens,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=1,
            beta=0.0,
            loss_type="grpo",
            bf16=cell.dtype == "bfloat16",
            use_cpu=device == "cpu",
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        self.trainer = GRPOTrainer(
            model=cell.model(device),
            reward_funcs=[lambda prompts, completions, **_: [checksum(text) for text in completions]],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [prompt.question for prompt in prompts]}),
            processing_class=character_tokenizer(),
            callbacks=[_Clock(self, device)],
        )
        self.trainer.remove_callback(PrinterCallback)
        model = self.trainer.model
        script = ScriptedLengths(lengths, cell.prompt_tokens, cell.completion_tokens, device)
        plain = model.generate
        model.generate = lambda *a, **k: plain(*a, logits_processor=LogitsProcessorList([script]), **k)

    def step(self) -> float:
        """Seconds from the start of generation to the end of the optimiser step."""
        self.trainer.train()
        return self.seconds


class _Clock(TrainerCallback):
    def __init__(self, arm: TrlArm, device: str) -> None:
        self.arm, self.device = arm, device

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        self.arm.seconds = time.perf_counter() - self.start


def tuned(cell: Cell, lengths: Sequence[int], device: str, folder: str) -> tuple[TrlArm, int]:
    """TRL without activation checkpointing and with the fastest of three micro-batch sizes, and that size."""
    tried: dict[int, tuple[float, TrlArm]] = {}
    for size in (cell.rows, cell.rows // 2, cell.rows // 4):
        arm = TrlArm(cell, lengths, device, folder, per_device_train_batch_size=size, gradient_checkpointing=False)
        arm.step()
        tried[size] = min(arm.step() for _ in range(2)), arm
    best = min(tried, key=lambda size: tried[size][0])
    return tried[best][1], best


def measure(cell: Cell, law: str, device: str, steps: int) -> dict[str, Any]:
    lengths = lengths_of(law, cell)
    with tempfile.TemporaryDirectory() as folder:
        peer, size = tuned(cell, lengths, device, folder)
        default = TrlArm(cell, lengths, device, folder, per_device_train_batch_size=cell.group)
        ours = our_steps(
            cell,
            lengths,
            device=device,
            steps=steps + 1,
            peers={"trl_tuned": peer, "trl_default": default},
        )
    return {
        "cell": cell.name,
        "lengths": law,
        **describe(cell),
        "tokens": sum(lengths),
        "trl_tuned_micro_batch": size,
        "seconds": {"ours": summary(ours.seconds), **{name: summary(v) for name, v in ours.theirs.items()}},
        "stages": {name: summary([stage[name] for stage in ours.stages])["median"] for name in ours.stages[0]},
        "ratio_vs_trl_tuned": ratio(ours.theirs["trl_tuned"], ours.seconds),
        "ratio_vs_trl_default": ratio(ours.theirs["trl_default"], ours.seconds),
    }


def zero_variance(cell: Cell, device: str, steps: int) -> dict[str, Any]:
    """Update time when half of the groups have equal rewards, with their rows skipped and not."""
    lengths = lengths_of("fixed", cell)
    update: dict[bool, list[float]] = {}
    for skip in (True, False):
        ours = our_steps(
            cell,
            lengths,
            device=device,
            steps=steps + 1,
            peers={},
            equal_share=0.5,
            skip=skip,
        )
        update[skip] = [stage["time/backward"] + stage["time/optimizer"] for stage in ours.stages]
    return {
        "cell": cell.name,
        "update_seconds": {"skipped": summary(update[True]), "kept": summary(update[False])},
        "update_time_ratio": round(summary(update[True])["median"] / summary(update[False])["median"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side, after one warm-up")
    parser.add_argument("--cells", nargs="+", help="names of cells; all of the device's by default")
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "scripted"], default=["fixed", "scripted"])
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    record: dict[str, Any] = {"benchmark": "step", **surroundings(arguments.device), "cells": [], "zero_variance": []}
    for cell in [SMALL, MEDIUM] if arguments.device == "cpu" else [HALF_BILLION]:
        if arguments.cells and cell.name not in arguments.cells:
            continue
        for law in arguments.lengths:
            record["cells"].append(measure(cell, law, arguments.device, arguments.steps))
            print(json.dumps(record["cells"][-1]), flush=True)
        record["zero_variance"].append(zero_variance(cell, arguments.device, arguments.steps))
        print(json.dumps(record["zero_variance"][-1]), flush=True)
    assert character_tokenizer().eos_token_id == EOS, "the scripts end rows with the tokenizer's EOS"
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
