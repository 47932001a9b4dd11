"""Environments of users are found as a project's own modules would be, here and in processes started from here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TINY_POLICY

PLUGINS = Path(__file__).parents[2] / "plugins"
PATIENT = {"reset_timeout_s": 240, "step_timeout_s": 240}  # processes that import much, on a machine that is busy
sys.path.append(str(PLUGINS))


@pytest.fixture
def five_rollouts(command_line: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``five_rollouts(name, class_path, shown=False, group_size=4, **init_args)``: trains a tiny policy for five
    rollouts on the tasks that an environment brings along, after a cold start if they are ``shown``; all sessions."""

    def train(
        name: str, class_path: str, *, shown: bool = False, group_size: int = 4, **init_args: Any
    ) -> list[dict[str, Any]]:
        environment = {"class_path": class_path, "init_args": init_args}
        shape = {**TINY_POLICY, "max_position_embeddings": 96, "tie_word_embeddings": False}
        tags = ["<calc>", "</calc>", "<result>", "</result>", "<error>", "</error>"]
        model = {
            "policy": {"from_scratch": shape, "characters": "0123456789+=", "tags": tags if shown else []},
            "environment": environment,
            "episodes": {"max_turns": 3, "plain_turns": {"observation": "{observation}"}, **PATIENT},
            "rewards": [{"class_path": "grpo_pl.rewards.EnvironmentReward", "init_args": {"correctness": True}}],
            "algorithm": {"group_size": group_size, "beta": 0.0},
            "sampling": {"max_completion_length": 10 if shown else 3},
            "optimization": {"lr": 1e-2},
        }
        if shown:
            model["cold_start"] = {"steps": 80, "batch_size": 4, "count": 4, "lr": 1e-2}
        source = "shown_tasks.ShownPrompts" if shown else "grpo_pl.extras.agents.environment_tasks.EnvironmentPrompts"
        config = {
            "seed_everything": 0,
            "trainer": {"accelerator": "cpu", "limit_val_batches": 0},
            "model": model,
            "data": {
                "source": {"class_path": source, "init_args": {"environment": environment, "val_share": 0.2}},
                "steps": 5,
                "prompts_per_step": 1 if shown else 2,
                "val_prompts": 1,
            },
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        command_line.done("fit", f"--config={file}", f"--name={name}")
        lines = (command_line.runs / name / "completions.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return train
