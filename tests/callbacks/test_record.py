"""``run.json``: what a run was, and when it went on."""

import json
from typing import Any

from grpo_pl.callbacks.record import command_typed, objective_name
from grpo_pl.config.presets import preset_name
from grpo_pl.config.shipped import CONFIGS
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rollout.native.decode_kernel import built_kernels


def test_a_run_says_what_it_was_and_a_resumed_one_when_it_went_on(command_line: Any) -> None:
    config = command_line.config("noted")
    assert command_line("fit", "--config", config, "--data.steps=2").status == 0
    file = command_line.runs / "noted" / "run.json"
    facts = json.loads(file.read_text())
    assert facts["parameters"] == facts["trained_parameters"] > 1000
    assert (facts["seed"], facts["rollouts"], facts["processes"]) == (0, 2, 1)
    assert facts["model"] == "from scratch (qwen2)" and facts["command"] == "grpo-pl"
    assert facts["objective"] == "grpo_no_kl"
    assert len(facts["data"]["digest"]) == 16 and facts["data"]["held_out"]["val"] > 0
    assert {"python", "grpo_pl", "torch", "lightning", "transformers"} == facts["versions"].keys()

    assert command_line("fit", "--config", config, "--data.steps=3", "--resume").status == 0
    again = json.loads(file.read_text())
    assert {key: again[key] for key in facts} == facts
    assert [entry.keys() for entry in again["resumed"]] == [{"started", "command", "versions", "compute"}]
    assert facts["compute"] == again["resumed"][0]["compute"]
    assert facts["compute"]["precision"] == "32-true" and facts["compute"]["decoder"] in ("torch", *built_kernels())

    assert command_line("fit", "--config", config, "--data.steps=1", "--data.val_prompts=3").status == 0
    other = json.loads((command_line.runs / "noted-2" / "run.json").read_text())
    assert other["data"]["digest"] != facts["data"]["digest"]  # other held-out problems
    page = (command_line.runs / "noted" / "report.html").read_text()
    assert facts["data"]["digest"] in page


def test_the_command_is_as_it_was_typed() -> None:
    assert command_typed(["/usr/bin/grpo-pl", "fit", "--name=my run"]) == "grpo-pl fit '--name=my run'"
    assert command_typed(["/x/grpo_pl/__main__.py", "fit"]) == "python -m grpo_pl fit"


def test_an_objective_bears_the_name_of_its_preset() -> None:
    assert objective_name(GRPOAlgorithm(group_size=5)) == "grpo"
    assert objective_name(GRPOAlgorithm(epsilon_high=0.28)).startswith("GRPOAlgorithm of its own: baseline group_mean")
    names = {file.stem for file in (CONFIGS / "algorithm").glob("*.yaml")}
    assert "dr_grpo" in names and preset_name({}) is None
