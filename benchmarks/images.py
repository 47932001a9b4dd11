"""Times whole GRPO steps on images, rollout to optimiser, of this project and of TRL's GRPOTrainer, with the same tiny
model and problems.

    python benchmarks/images.py --output images.json                        # random weights, as configs/shapes.yaml
    python benchmarks/images.py --model runs/shapes/export --output images.json

Both take turns, each time in a process of its own, score with the same reward, and train all weights without a
reference. TRL runs without activation checkpointing, and with the fastest of three micro-batch sizes. Completions end
where they end, of other draws on both sides: the record has their mean lengths.
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
import yaml
from common import BARE_TRL, bare_trainer, be_quiet, machine_arguments, parser_of, publish, summary, surroundings
from lightning.pytorch import Callback
from runs import CONFIGS
from step import Checksum, checksum

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.inputs import encode_prompt, reader_of
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import Problem, SamplingParams

GROUP, LONGEST, RATE = 8, 48, 1e-6
SOURCE = ShapePrompts(questions=("count",))
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)
"""Writes a question with its image as our template does, which needs none."""


class Watch(Callback):
    """Takes the time at both ends of every step, and the mean length of its completions."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.lengths: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)
        self.lengths.append(float(trainer.callback_metrics["completions/mean_length"]))


def ours(folder: str, steps: int, prompts: int) -> Watch:
    module = GRPOModule(
        policy=PolicyConfig(path=folder, images=True, train_vision=True),
        rewards=[Checksum()],
        algorithm=GRPOAlgorithm(group_size=GROUP, beta=0.0),
        sampling=SamplingParams(max_completion_length=LONGEST),
        optimization=Optimization(lr=RATE),
    )
    watch = Watch()
    bare_trainer(watch).fit(module, RolloutDataModule(source=SOURCE, steps=steps, prompts_per_step=prompts))
    return watch


def trl(folder: str, steps: int, prompts: int, size: int) -> Watch:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    policy = PolicyConfig(path=folder, images=True, train_vision=True)
    tokenizer = load_tokenizer(policy)
    reader: Any = reader_of(tokenizer)
    reader.processor.chat_template = tokenizer.chat_template = CHAT
    problems = [problem for step in range(steps) for problem in SOURCE.prompts(step, count=prompts)]
    check_prompt(reader.processor, problems[0], folder)
    watch = Watch()

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch._begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.seconds.append(time.perf_counter() - watch._begun)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.lengths.append(statistics.mean(map(len, completion_ids)))
        return list(map(checksum, completion_ids))

    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=load_model(policy, tokenizer),
            reward_funcs=[reward],
            args=GRPOConfig(
                output_dir=output, max_steps=steps, generation_batch_size=prompts * GROUP, num_generations=GROUP,
                per_device_train_batch_size=size, gradient_accumulation_steps=prompts * GROUP // size,
                max_completion_length=LONGEST, learning_rate=RATE, lr_scheduler_type="constant", beta=0.0,
                loss_type="grpo", shuffle_dataset=False, use_cpu=True, bf16=False, gradient_checkpointing=False,
                **BARE_TRL,
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": p.question}], "image": p.columns["images"][0].pil()}
                 for p in problems]
            ),
            processing_class=reader.processor,
            callbacks=[Times()],
        )  # fmt: skip
        trainer.train()
    return watch


def check_prompt(processor: Any, problem: Problem, folder: str) -> None:
    """Refuses a processor that reads a problem as other tokens than our policy does."""
    parts = [{"type": "image", "image": problem.columns["images"][0].pil()}, {"type": "text", "text": problem.question}]
    read = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=True, return_dict=True)
    tokenizer = load_tokenizer(PolicyConfig(path=folder, images=True))
    own = encode_prompt(problem.question, problem.columns, PromptTemplate(), tokenizer).ids
    assert list(read["input_ids"][0]) == own, "TRL would read another prompt"


def made(folder: Path) -> str:
    """A model of random weights with the shape of ``configs/shapes.yaml``."""
    policy = PolicyConfig(**yaml.safe_load((CONFIGS / "shapes.yaml").read_text())["model"]["policy"])
    tokenizer = load_tokenizer(policy)
    load_model(policy, tokenizer).save_pretrained(folder)
    reader_of(tokenizer).save_pretrained(folder)  # type: ignore[union-attr]
    return str(folder)


def in_a_process(arm: str, folder: str, steps: int, arguments: Any, size: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, f"--arm={arm}", f"--model={folder}", f"--steps={steps}", f"--size={size}"]
    command += [f"--prompts={arguments.prompts}", f"--threads={arguments.threads}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = parser_of(__doc__)
    machine_arguments(parser)
    parser.add_argument("--model", help="an export of a policy that reads images; random weights by default")
    parser.add_argument("--steps", type=int, default=8, help="of each process; the first one does not count")
    parser.add_argument("--prompts", type=int, default=64, help=f"of a step, with {GROUP} completions each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=("ours", "trl"), help="only this one, once: how the comparison calls itself")
    parser.add_argument("--size", type=int, default=64, help="completions of a micro-batch of that arm of TRL")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.arm:
        be_quiet()
        work = (arguments.model, arguments.steps, arguments.prompts)
        watch = ours(*work) if arguments.arm == "ours" else trl(*work, arguments.size)
        print(json.dumps({"seconds": watch.seconds, "lengths": watch.lengths}))
        return
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or made(Path(scratch) / "model")
        sizes = [arguments.prompts * GROUP // halved for halved in (1, 4, 16)]
        tried = {size: min(in_a_process("trl", folder, 3, arguments, size)["seconds"][1:]) for size in sizes}
        best = min(tried, key=tried.__getitem__)
        for _ in range(arguments.rounds):
            found["ours"].append(in_a_process("ours", folder, arguments.steps, arguments))
            found["trl"].append(in_a_process("trl", folder, arguments.steps, arguments, best))
    medians = {arm: [statistics.median(each["seconds"][1:]) for each in rounds] for arm, rounds in found.items()}
    ratios = [theirs / mine for mine, theirs in zip(medians["ours"], medians["trl"], strict=True)]
    record = {
        "benchmark": "images",
        **surroundings("cpu"),
        "threads": arguments.threads,
        "model": "random weights" if arguments.model is None else "trained",
        "steps": arguments.steps,
        "prompts": arguments.prompts,
        "group": GROUP,
        "seconds_a_step": {arm: summary(seconds) for arm, seconds in medians.items()},
        "trl_over_ours": [round(ratio, 2) for ratio in ratios],
        "mean_length": {arm: round(statistics.mean(rounds[0]["lengths"]), 1) for arm, rounds in found.items()},
        "trl_micro_batch": best,
        "trl_seconds_by_micro_batch": {str(size): round(seconds, 3) for size, seconds in tried.items()},
    }
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
