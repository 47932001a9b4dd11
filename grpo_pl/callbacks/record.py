"""The record of a run: ``run.json`` with command, data and versions, and a resumed run's ``config.yaml``."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

import grpo_pl
from grpo_pl.config.presets import preset_name
from grpo_pl.config.terms import ROOM
from grpo_pl.data.cells import image_digests
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.files.rows import read_object
from grpo_pl.files.runs import RunFolder, keep_config
from grpo_pl.files.writing import best_effort, staged
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.training.lightning_loops import data_of
from grpo_pl.training.module import GRPOModule

LONGEST_EXAMPLE = 8000
"""Most characters of an example, as JSON."""
PACKAGES = ("torch", "lightning", "transformers")


class RunRecord(Callback):
    """Writes the facts of a run once its policy is there; a resumed run keeps them and adds when it went on.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._threads = torch.get_num_threads()  # before those of an engine in its own process are taken from them

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        facts = facts_of(trainer, cast(GRPOModule, pl_module), threads=self._threads)  # on all ranks
        if not trainer.is_global_zero:
            return
        with best_effort(self.path):
            if trainer.ckpt_path is not None and self.path.exists():
                before = read_object(self.path)
                again = {key: facts[key] for key in ("started", "command", "versions", "compute")}
                facts = {**before, "resumed": [*before.get("resumed", []), again]}
            with staged(self.path) as file:
                file.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def facts_of(trainer: Trainer, module: GRPOModule, *, threads: int) -> dict[str, Any]:
    """The facts of this process's run, which began with so many threads."""
    policy, data = module.require_policy(), data_of(trainer)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in policy.parameters()]
    given = module.policy_config
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_typed(sys.argv),
        "model": given.path or f"from scratch ({policy.config.model_type})",
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
        "seed": module.seed,
        "objective": objective_name(module.configured_algorithm),
        "rollouts": data.steps,
        "compute": {
            "precision": str(trainer.precision),
            "decoder": module.decoder or "",
            "threads": threads,
        },
        "examples": examples_of(data),
        "data": {
            "source": type(data.source).__name__,
            "digest": data_digest(data),
            "held_out": {name: len(problems) for name, problems in data.held_out().items()},
        },
        "versions": versions(),
        "machine": {
            "system": platform.platform(),
            "processor": processor_name(),
            "device": str(trainer.strategy.root_device),
        },
        "processes": trainer.world_size,
    }


def versions() -> dict[str, str]:
    """Version of Python, of ours, and of the packages that compute."""
    packages = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "grpo_pl": grpo_pl.__version__, **packages}


def processor_name() -> str:
    """The kind of processor, and the instructions that torch takes; bits of a run depend on both."""
    kind = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kind = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}"


def command_typed(argv: Sequence[str]) -> str:
    """The command line that started this process, without the folder of the program."""
    program = Path(argv[0])
    started = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*started, *argv[1:]])


def objective_name(algorithm: GRPOAlgorithm) -> str:
    """The preset that the objective is, or else its class and its four main fields."""
    name = preset_name(plain_fields(algorithm))
    if name is not None:
        return name
    parts = {name: getattr(algorithm, name) for name in ("baseline", "scale", "aggregation", "surrogate")}
    words = [f"{name} {value if isinstance(value, str) else type(value).__name__}" for name, value in parts.items()]
    return f"{type(algorithm).__name__} of its own: {', '.join(words)}"


def plain_fields(algorithm: GRPOAlgorithm) -> dict[str, Any]:
    """The fields of an objective that are plain values; nothing of one with parts of its own, which a server could not
    rebuild."""
    values = algorithm.values()
    ours = all(spec["class_path"].startswith(f"{ROOM}.") for spec in values["terms"].values())
    plain = ours and all(isinstance(v, str | int | float | None) for name, v in values.items() if name != "terms")
    return values if plain and type(algorithm) is GRPOAlgorithm else {}


def examples_of(data: RolloutDataModule) -> list[dict[str, Any]]:
    """Up to three held-out problems as examples for people: ``problem``, ``answer``, further ``columns`` that rewards
    may read, and ``images`` as ``data:`` URLs where it has some; those without a question, or with more than a form
    should begin with, are left out."""
    examples: list[dict[str, Any]] = []
    for problem in (problem for problems in data.held_out().values() for problem in problems):
        images = problem.columns["images"] if image_digests(problem) else ()
        if sum(len(image.png) for image in images) > LONGEST_EXAMPLE:
            continue
        columns = {name: cell for name, cell in problem.columns.items() if not (images and name == "images")}
        example = {"problem": problem.question, "answer": problem.answer, "columns": columns}
        if images:
            example["images"] = [image.data_url() for image in images]
        with suppress(TypeError, ValueError):  # a column of other than JSON types
            if problem.question.strip() and len(json.dumps(example)) <= LONGEST_EXAMPLE:
                examples.append(example)
        if len(examples) == 3:
            break
    return examples


def data_digest(data: RolloutDataModule) -> str:
    """Names the data: the files that problems are read from, by their digests, and the held-out problems with the
    pixels of their images."""
    problems = {
        name: [[problem.id, problem.question, problem.answer, *image_digests(problem)] for problem in problems]
        for name, problems in data.held_out().items()
    }
    files = {place: digest for place, (digest, _) in data.digests().items()}
    text = json.dumps([files, problems], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


class KeepConfiguration(Callback):
    """Writes the configuration at the start of training, when the checkpoint has been accepted.

    Args:
        folder: the run's folder.
        config: the resolved configuration.
    """

    def __init__(self, folder: RunFolder, config: str) -> None:
        self.folder, self.config = folder, config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with best_effort(self.folder.config):
                keep_config(self.folder, self.config)
