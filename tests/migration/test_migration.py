"""What version 0.3.0 wrote goes on working: configurations, options, a run folder, its checkpoint and its export."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_pl.config.objects import build
from grpo_pl.objective.fields import Objective
from grpo_pl.policy.trained import find_model
from grpo_pl.training.module import GRPOModule

HERE = Path(__file__).parent
TRAINED = HERE / "trained"
CONFIGS = sorted(file for file in (HERE / "configs").glob("*.yaml") if file.stem != "base")
PLAIN = {
    *("group_size", "num_iterations", "num_minibatches", "reward_aggregation", "max_rewards", "overlong_buffer"),
    *("baseline", "scale", "std_ddof", "std_eps", "ratio_level", "surrogate", "epsilon_low", "epsilon_high"),
    *("dual_clip", "cispo_cap", "sapo_temperature_positive", "sapo_temperature_negative", "aggregation", "beta"),
    *("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative", "kl_estimator"),
    *("kl_placement", "reference", "ref_update_every", "samples", "mask_truncated", "skip_zero_advantage"),
    *("dynamic_sampling", "max_resample_attempts", "mismatch", "mismatch_min", "mismatch_max", "off_policy_mask"),
}
"""Fields of plain GRPO and its budget, which the tests of presets hold."""


def _algorithm_of(file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(file.read_text())["model"]["algorithm"]
    return fields


def _printed(command_line: Any, *options: str) -> dict[str, Any]:
    outcome = command_line.done("fit", f"--config={HERE / 'configs' / 'base.yaml'}", *options, "--print_config")
    printed: dict[str, Any] = yaml.safe_load(outcome.out)
    return printed


MOVED: dict[str, tuple[str, str]] = {"anchor_coef": ("anchor", "coef")}
"""Field of 0.3.0 -> term and field now."""


def _assert_means(objective: Objective, given: dict[str, Any]) -> None:
    """The objective has the values that a configuration gives under the names of 0.3.0."""
    for name, value in given.items():
        term, field = MOVED.get(name, ("", name))
        assert getattr(objective.terms[term] if term else objective, field) == value, name


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_configuration_and_the_same_options_mean_the_same(command_line: Any, file: Path) -> None:
    given = _algorithm_of(file)
    model = _printed(command_line, f"--config={file}")["model"]
    _assert_means(build(GRPOModule, model, "model").algorithm, given)
    rest = yaml.safe_load(file.read_text())
    del rest["model"]["algorithm"]
    beside = command_line.folder / file.name
    beside.write_text(yaml.safe_dump(rest))
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    options = [f"--model.algorithm.{name}={value}" for name, value in shown.items()]
    assert _printed(command_line, f"--config={beside}", *options)["model"] == model


def test_every_field_that_is_not_plain_grpo_is_given_somewhere() -> None:
    given = {name for file in (*CONFIGS, HERE / "trained.yaml") for name in _algorithm_of(file)}
    fields = set(Objective.__dataclass_fields__) - {"terms"}
    assert given - fields == set(MOVED)
    assert fields - PLAIN - given == set()


@pytest.mark.parametrize("alone", [False, True], ids=["in_its_run", "alone"])
def test_a_checkpoint_is_loaded(tmp_path: Path, alone: bool) -> None:
    file = TRAINED / "checkpoints" / "rollout-000002.ckpt"
    if alone:
        file = Path(shutil.copy(file, tmp_path / "moved.ckpt"))
    module = GRPOModule.load_from_checkpoint(file)
    _assert_means(module.algorithm, _algorithm_of(HERE / "trained.yaml"))
    weights, exported = module.require_policy().state_dict(), find_model(TRAINED / "export").load_policy("cpu")
    assert all(torch.equal(weights[name], value) for name, value in exported.state_dict().items())


def test_an_export_is_the_start_of_a_run(command_line: Any) -> None:
    export = TRAINED / "export"
    assert find_model(export).sampling.max_completion_length == 12
    policy = [f"--model.policy.path={export}", "--model.policy.from_scratch=null"]
    command_line.done("fit", f"--config={HERE / 'trained.yaml'}", *policy, "--data.steps=1", "--name=from_export")
    assert (command_line.runs / "from_export" / "export" / "model.safetensors").is_file()


def test_a_run_goes_on_from_its_checkpoint(
    command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]]
) -> None:
    run = command_line.runs / "trained"
    shutil.copytree(TRAINED, run, symlinks=True)
    before = read_metrics(run / "metrics.csv")
    outcome = command_line.done(
        "fit", f"--config={HERE / 'trained.yaml'}", "--resume", "--name=trained", "--data.steps=4"
    )
    assert "rollout-000002.ckpt" in outcome.err
    rows = read_metrics(run / "metrics.csv")
    assert rows[: len(before)] == before
    steps = {int(row["step"]): row for row in rows if "reward" in row}
    assert list(steps) == [1, 2, 3, 4]
    assert steps[3].keys() == steps[2].keys() == steps[4].keys()
    # grows by entropy_coef_step while the entropy is at most entropy_target, which it always is here
    assert [float(row["entropy_coef"]) for row in steps.values()] == pytest.approx([0.03, 0.05, 0.07, 0.09])
    # half a cosine from 0.5 to 0.1 over four rollouts
    shares = [0.1 + 0.4 * (1 + math.cos(math.pi * number / 4)) / 2 for number in range(4)]
    assert [float(row["demonstration/share"]) for row in steps.values()] == pytest.approx(shares)
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "rollout-000004.ckpt"
