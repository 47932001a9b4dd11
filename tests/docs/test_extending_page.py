"""The classes of docs/extending.md, and the engine of docs/engines.md, run as they stand there."""

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams
from tests.docs.pages import as_module, blocks, page

TINY_POLICY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
TINY_POLICY |= {"num_key_value_heads": 1, "intermediate_size": 16}
PAGE = page("extending")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of everything that the page writes into ``my_parts.py``."""
    found = blocks(PAGE, "python", "# my_parts.py")
    assert len(found) == 6
    as_module("my_parts", "\n".join(found), tmp_path, monkeypatch)
    return "my_parts"


def test_a_run_takes_the_parts_of_the_page(command_line: Any, parts: str) -> None:
    estimator, term, _, callback = map(yaml.safe_load, blocks(PAGE, "yaml"))
    algorithm = {"group_size": 4, "beta": 0.0, "surrogate": {"class_path": f"{parts}.PulledBack"}}
    config = command_line.config(
        "extended",
        model__algorithm={**algorithm, **estimator["model"]["algorithm"], **term["model"]["algorithm"]},
        trainer={"accelerator": "cpu", "limit_val_batches": 0, **callback["trainer"]},
        data__steps=2,
    )
    command_line.done("fit", "--config", config)
    rows = list(csv.DictReader((command_line.runs / "extended" / "metrics.csv").open()))
    assert all(float(row["leash"]) >= 0.0 for row in rows)
    assert all(float(row["longest_answer"]) == float(row["completions/max_length"]) for row in rows)


def test_an_algorithm_of_the_page_goes_through_every_verb(command_line: Any, parts: str, tmp_path: Path) -> None:
    config = command_line.config("own_algorithm", trainer={"accelerator": "cpu", "limit_val_batches": 0}, data__steps=2)
    options = [f"--model.algorithm={parts}.MedianAlgorithm", "--model.algorithm.gain=2"]
    command_line.done("fit", "--config", config, *options)
    run = command_line.runs / "own_algorithm"
    kept = yaml.safe_load((run / "config.yaml").read_text())["model"]["algorithm"]
    assert kept["class_path"] == f"{parts}.MedianAlgorithm"
    assert (kept["init_args"]["gain"], kept["init_args"]["group_size"]) == (2.0, 4)
    again = command_line("fit", "--config", run / "config.yaml", "--name=again")  # as its own configuration says
    assert again.status == 0, again.err
    figures = [
        [(row["reward"], row["entropy"], row["grad_norm"]) for row in csv.DictReader(file.open())]
        for file in (run / "metrics.csv", command_line.runs / "again" / "metrics.csv")
    ]
    assert figures[0] == figures[1]
    command_line.done("plan", f"--config={config}", "--gpus=1", *options)
    kept_problems = ["--samples=1", "--keep=0..1", "--prompts=2", f"--output={tmp_path / 'kept.jsonl'}"]
    command_line.done("filter", f"--config={run / 'config.yaml'}", *kept_problems)


def test_the_algorithm_of_the_page_by_hand(parts: str) -> None:
    kind = importlib.import_module(parts).MedianAlgorithm
    found = kind(group_size=4, gain=2.0).advantages(
        values=torch.tensor([[[1.0, 0.0, 0.0, 0.4], [1.0, float("nan"), 1.0, 1.0]]]),
        reward_weights=torch.ones(1),
        lengths=torch.full((2, 4), 3),
        truncated=torch.zeros(2, 4, dtype=torch.bool),
    )
    # of the others 0, 0, 0.4 the median is 0; of 1, 0, 0.4 it is 0.4; of 1, 0, 0 it is 0
    assert torch.allclose(found.advantages, torch.tensor([[2.0, -0.8, -0.8, 0.8], [0.0, 0.0, 0.0, 0.0]]))
    assert found.active.tolist() == [[True] * 4, [False] * 4]


def test_the_subclass_of_the_page_takes_no_gradient_from_what_was_cut(parts: str) -> None:
    kind = importlib.import_module(parts).NothingCut
    for module_class, learns in ((GRPOModule, True), (kind, False)):
        module = module_class(
            policy=PolicyConfig(from_scratch=TINY_POLICY),
            rewards=[ExactReward(correctness=True)],
            algorithm=GRPOAlgorithm(group_size=2, beta=0.0, skip_zero_advantage=False),
            sampling=SamplingParams(max_completion_length=1),  # nothing but the end itself is whole
            max_tokens_per_microbatch=100,
        )
        data = RolloutDataModule(ArithmeticPrompts(digits=1), steps=1, prompts_per_step=2)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, use_distributed_sampler=False, **quiet)
        trainer.fit(module, datamodule=data)
        assert trainer.callback_metrics["completions/clipped_ratio"] == 1.0
        assert ("loss" in trainer.callback_metrics) == learns


def test_a_run_takes_the_engine_of_the_page(command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(page("engines"), "python", "# my_parts.py")
    as_module("my_parts", block, tmp_path, monkeypatch)
    (named,) = [block for block in blocks(page("engines"), "yaml") if "{class_path: my_parts" in block]
    engine = yaml.safe_load(named)["model"]["engine"] | {"init_args": {"tokens_per_update": 2}}
    config = command_line.config(
        "growing", model__engine=engine, model__sampling={"max_completion_length": 5}, data__steps=4
    )
    command_line.done("fit", "--config", config)
    rows = list(csv.DictReader((command_line.runs / "growing" / "metrics.csv").open()))
    longest = [float(row["completions/max_length"]) for row in rows if row["completions/max_length"]]
    assert longest == [2, 4, 5, 5]
