"""The classes of docs/extending.md run as they stand there."""

import csv
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams

TINY_POLICY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
TINY_POLICY |= {"num_key_value_heads": 1, "intermediate_size": 16}
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of everything that the page writes into ``my_parts.py``."""
    blocks = re.findall(r"^```python\n# my_parts\.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    (tmp_path / "my_parts.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return "my_parts"


def test_a_run_takes_the_parts_of_the_page(command_line: Any, parts: str) -> None:
    estimator, callback = (
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    )
    algorithm = {"group_size": 4, "beta": 0.0, "surrogate": {"class_path": f"{parts}.PulledBack"}}
    config = command_line.config(
        "extended",
        model__algorithm={**algorithm, **estimator["model"]["algorithm"]},
        trainer={"accelerator": "cpu", "limit_val_batches": 0, **callback["trainer"]},
        data__steps=2,
    )
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 0, outcome.err
    rows = list(csv.DictReader((command_line.runs / "extended" / "metrics.csv").open()))
    assert all(float(row["longest_answer"]) == float(row["completions/max_length"]) for row in rows)


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
