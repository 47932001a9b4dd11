"""Reward functions written for TRL inside a run: what they get, and where what they note ends up."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.callbacks.completions import flat_row
from grpo_pl.callbacks.export import ExportPolicy
from grpo_pl.rewards import FunctionReward

FUNCTIONS = """
def judge(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, **kwargs):
    log_extra("tokens", [len(ids) for ids in completion_ids])
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    assert kwargs["completion_length"] == [len(ids) for ids in completion_ids]
    return [float(len(ids) % 2) for ids in completion_ids]

async def brevity(completions, **kwargs):
    return [-len(text) / 100 for text in completions]

def clash(completions, log_metric, trainer_state):
    if trainer_state.global_step < trainer_state.max_steps:
        log_metric(NAME, 1.0)
    return [0.0] * len(completions)
"""


def _rewards(file: Path, *names: str) -> list[dict[str, Any]]:
    return [
        {
            "class_path": "grpo_pl.rewards.FunctionReward",
            "init_args": {"function": f"{file}:{name}", "name": name, "correctness": number == 0},
        }
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_run_hands_over_tokens_and_state_and_keeps_what_is_noted(
    command_line: Any, tmp_path: Path, read_metrics: Any, dynamic: bool
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    config = command_line.config("noted", model__rewards=_rewards(tmp_path / "mine.py", "judge", "brevity"))
    options = ["--data.steps=2", f"--name=noted{dynamic}", f"--model.algorithm.dynamic_sampling={dynamic}"]
    command_line.done("fit", f"--config={config}", *options)
    run = command_line.runs / f"noted{dynamic}"
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["extra"] == {"tokens": row["tokens"]} for row in rows)
    assert flat_row(rows[0])["extra/tokens"] == rows[0]["tokens"]
    metrics = read_metrics(run / "metrics.csv")
    assert [float(row["progress"]) for row in metrics if "progress" in row] == [0.0, 0.5]
    assert [float(row["val/progress"]) for row in metrics if "val/progress" in row] == [0.0, 1.0]


@pytest.mark.parametrize("name", ["lr", "pass@1"])  # of a rollout, and of a validation
def test_a_metric_of_ours_is_not_overwritten(command_line: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(f"NAME = {name!r}\n{FUNCTIONS}")
    config = command_line.config("clash", model__rewards=_rewards(tmp_path / "mine.py", "clash"))
    done = command_line("fit", f"--config={config}", "--data.steps=1", "--name=clash")
    assert done.status != 0
    assert f"log_metric({name!r}): a metric of that name is logged already" in done.err


def test_a_reward_that_no_export_can_name_is_refused_before_the_training() -> None:
    reward = FunctionReward(function=lambda completions, **_: [1.0] * len(completions))
    with pytest.raises(ValueError, match="cannot be found by name"):
        ExportPolicy(Path("nowhere")).on_fit_start(SimpleNamespace(), SimpleNamespace(rewards=[reward]))
