"""A run whose rewards do not say what is right: it is measured by them, and nothing speaks of pass@1."""

import json
import re
from typing import Any

import pytest

from grpo_pl.evaluation.curves import read_curves
from grpo_pl.files.checkpoints import facts_of

FORM = {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"partial": True}}
LENGTH = {
    "class_path": "grpo_pl.rewards.LengthReward",
    "init_args": {"shape": "budget", "max_length": 2, "weight": 0.5},
}
STOPPING = {
    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
    "init_args": {
        "monitor": "val/reward",
        "mode": "max",
        "min_delta": 5.0,
        "patience": 1,
    },  # after the second validation
}


def test_a_run_is_measured_stopped_and_kept_by_its_held_out_reward(command_line: Any) -> None:
    short: dict[str, Any] = {"model__cold_start": None, "model__sampling": {"max_completion_length": 8}}
    trainer = {"accelerator": "cpu", "val_check_interval": 1, "callbacks": [STOPPING]}
    config = command_line.config("form", model__rewards=[FORM, LENGTH], data__steps=3, trainer=trainer, **short)
    outcome = command_line.done("fit", "--config", config)
    assert "No reward has `correctness: true`: val/reward" in outcome.err
    assert re.search(r"│ reward +│ .*│ reward format +│", outcome.out, re.DOTALL)
    run = command_line.runs / "form"
    columns = read_curves(run / "metrics.csv")
    assert {"val/reward", "val/rewards/format", "val/rewards/length"} <= columns.keys()
    assert not any(word in name for name in columns for word in ("pass@", "maj@", "greedy", "correct"))
    sums = zip(columns["val/reward"], columns["val/rewards/format"], columns["val/rewards/length"], strict=True)
    assert all(total == pytest.approx(form + 0.5 * length, abs=1e-6) for (_, total), (_, form), (_, length) in sums)
    assert columns["reward"][-1][0] == 1  # stopped after the first rollout
    facts = facts_of((run / "checkpoints" / "best.ckpt").resolve())
    assert facts is not None and facts["val/reward"] == pytest.approx(columns["val/reward"][-1][1])
    page = (run / "report.html").read_text()
    data = json.loads(page.split('type="application/json" id="data">')[1].split("</script>")[0])
    assert data["tiles"][0]["label"] == "reward, held out"
    assert [chart["title"] for chart in data["held_out"]["charts"]] == ["Held-out reward"]
    assert all(
        "correct" not in one for rollout in data["samples"] for g in rollout["groups"] for one in g["completions"]
    )
    assert not re.search("pass@|maj@", json.dumps([data["held_out"], data["charts"], data["tiles"]]))


def test_what_needs_a_right_answer_is_refused_without_one(command_line: Any) -> None:
    source = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 1}}
    curriculum = {"class_path": "grpo_pl.data.curriculum.CurriculumPrompts", "init_args": {"source": source}}
    config = command_line.config("form2", model__rewards=[FORM], model__cold_start=None)
    for told, *options in (
        ("model.algorithm", "--model.algorithm.samples=correct"),
        ("no validation measures 'val/pass@1'", "--checkpoint.monitor=val/pass@1"),
        ("CurriculumPrompts, which follows what is solved,", f"--data.source={json.dumps(curriculum)}"),
    ):
        outcome = command_line("fit", "--config", config, *options)
        assert outcome.status == 1 and told in outcome.err, outcome.err
