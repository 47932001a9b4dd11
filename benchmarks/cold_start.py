"""How many demonstrations a pretrained model needs: right and boxed held-out answers by count, all weights and LoRA.

python benchmarks/cold_start.py --path HuggingFaceTB/SmolLM2-135M-Instruct --output cold_start.json
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import add, parser_of, surroundings, write
from lightning.pytorch import Trainer
from runs import CONFIGS

from grpo_pl.cli.answering import Answerer
from grpo_pl.config.objects import read
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.policy.loading import load_model, load_tokenizer
from grpo_pl.training.cold_start_fit import make_start
from grpo_pl.training.module import GRPOModule

SHOWN = 4
"""Completions that a row of the record quotes."""


def measured(path: str, count: int, lora: bool, problems: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A row: the cold start's seconds, and what its policy answers to held-out problems, one sample each."""
    cold: dict[str, Any] = {**settings, "count": count} if count else {}
    overlay = {"model": {"policy": {"path": path}, "cold_start": cold or None}}
    files = [CONFIGS / "smollm2.yaml", CONFIGS / "smollm2_box.yaml", *([CONFIGS / "smollm2_lora.yaml"] if lora else [])]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(overlay, file)
        file.flush()
        config = read([*files, Path(file.name)])
    data, module = config.build("data", RolloutDataModule), config.build("model", GRPOModule)
    if not count:
        module.cold_start = None
    module.derive_defaults(data)
    started, folder = time.perf_counter(), None
    if module.cold_start is not None:
        trainer = Trainer(accelerator="cpu", devices=1, logger=False)
        folder = make_start(module.cold_start, module.policy_config, module.template, data.source, trainer=trainer)
    seconds = time.perf_counter() - started
    module.tokenizer = load_tokenizer(module.policy_config)
    module.policy = load_model(module.policy_config, module.tokenizer, None if folder is None else str(folder)).eval()
    answerer = Answerer(sampler=module.sampler, model=module.policy, sampling=module.sampling, rewards=module.rewards)
    texts: list[str] = []
    right, ended = 0, list[bool]()
    asked = data.source.validation(problems)
    for drawn, scored in answerer.answers("answers", asked, len(asked), samples=1, seed=0, batch_size=50):
        texts += drawn.completions
        right += sum(verdict is True for verdict in scored.correct())
        ended += [reason == "stop" for reason in drawn.rollout.finish_reasons]
    boxed = [r"\boxed{" in text and end for text, end in zip(texts, ended, strict=True)]
    return {
        "demonstrations": count,
        "weights": "LoRA" if lora else "all",
        "cold_start": None if module.cold_start is None else {**cold, "lr": module.cold_start.lr},
        "seconds": round(seconds, 1),
        "problems": len(asked),
        "right": right / len(asked),
        "boxed_and_ended": sum(boxed) / len(asked),
        "completions": texts[:SHOWN],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--path", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--counts", type=int, nargs="*", default=[0, 8, 32, 128])
    parser.add_argument("--lora-counts", type=int, nargs="*", default=[32])
    parser.add_argument("--steps", type=int, default=16, help="of 8 demonstrations each, whatever their number")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--weights", default="", help="which weights these are, for the record")
    given = parser.parse_args()
    settings = {"steps": given.steps, "batch_size": 8}
    record: dict[str, Any] = {"weights": given.weights or given.path, "surroundings": surroundings("cpu"), "rows": []}
    for count, lora in [(k, False) for k in given.counts] + [(k, True) for k in given.lora_counts]:
        add(measured(given.path, count, lora, given.problems, settings), record["rows"])
        write(record, given.output)


if __name__ == "__main__":
    main()
