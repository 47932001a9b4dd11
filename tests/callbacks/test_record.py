"""``run.json``: what a run was, and when it went on."""

import json
from typing import Any

from grpo_pl.callbacks.record import command_typed, data_digest, objective_name
from grpo_pl.config.objects import read
from grpo_pl.config.shipped import CONFIGS
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.training.module import GRPOModule
from tests.callbacks.conftest import WholeRun


def test_a_run_says_what_it_was(whole: WholeRun) -> None:
    facts = json.loads((whole.folder / "run.json").read_text())
    assert facts["parameters"] == facts["trained_parameters"] > 1000
    assert (facts["seed"], facts["rollouts"], facts["processes"]) == (0, 4, 1)
    assert facts["model"] == "from scratch (qwen2)" and facts["command"] == "grpo-pl"
    assert facts["objective"] == "grpo_no_kl"
    assert len(facts["data"]["digest"]) == 16 and facts["data"]["held_out"]["val"] > 0
    assert {"python", "grpo_pl", "torch", "lightning", "transformers"} == facts["versions"].keys()
    assert facts["compute"]["precision"] == "32-true" and facts["compute"]["decoder"] in ("torch", *built_kernels())
    assert facts["data"]["digest"] in (whole.folder / "report.html").read_text()


def test_a_resumed_run_says_when_it_went_on(command_line: Any) -> None:
    config = command_line.config("noted", trainer={"accelerator": "cpu", "limit_val_batches": 0})
    file = command_line.runs / "noted" / "run.json"
    command_line.done("fit", "--config", config, "--data.steps=1")
    facts = json.loads(file.read_text())
    command_line.done("fit", "--config", config, "--data.steps=2", "--resume")
    again = json.loads(file.read_text())
    assert {key: again[key] for key in facts} == facts
    assert [entry.keys() for entry in again["resumed"]] == [{"started", "command", "versions", "compute"}]
    assert facts["compute"] == again["resumed"][0]["compute"]


def test_other_held_out_problems_are_other_data() -> None:
    few, more = (RolloutDataModule(ArithmeticPrompts(), steps=1, val_prompts=count) for count in (3, 6))
    assert data_digest(few) == data_digest(few) != data_digest(more)


def test_other_pixels_are_other_data() -> None:
    shown, permuted = (ShapePrompts(permuted=permuted) for permuted in (False, True))
    asked = [[(p.id, p.question, p.answer) for p in source.validation(9)] for source in (shown, permuted)]
    assert asked[0] == asked[1]
    one, other = (RolloutDataModule(source, steps=1, val_prompts=9) for source in (shown, permuted))
    assert data_digest(one) == data_digest(one) != data_digest(other)


def test_the_command_is_as_it_was_typed() -> None:
    assert command_typed(["/usr/bin/grpo-pl", "fit", "--name=my run"]) == "grpo-pl fit '--name=my run'"
    assert command_typed(["/x/grpo_pl/__main__.py", "fit"]) == "python -m grpo_pl fit"


def test_an_objective_bears_the_name_of_its_preset_and_up_to_two_fields_that_are_others() -> None:
    assert objective_name(GRPOAlgorithm(group_size=5)) == "grpo"
    assert objective_name(GRPOAlgorithm(beta=0.0, mismatch="in_ratio")) == "grpo_no_kl, mismatch in_ratio"
    assert objective_name(GRPOAlgorithm(epsilon_high=0.28, dual_clip=3.0)) == "grpo, epsilon_high 0.28, dual_clip 3.0"
    other = GRPOAlgorithm(epsilon_high=0.28, dual_clip=3.0, entropy_coef=0.01)
    assert objective_name(other).startswith("GRPOAlgorithm of its own: baseline group_mean")
    assert objective_name(read([CONFIGS / "quickstart.yaml"], []).build("model", GRPOModule).configured_algorithm) == (
        "grpo_no_kl, mismatch in_ratio"
    )
