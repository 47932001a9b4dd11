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


DISTILLED = {
    "distillation": "divergence",
    "distillation_mix": "mix",
    "distillation_top_k": "top_k",
    "distillation_coef": "coef",
    "teacher_advantage": "advantage",
    "teacher_clip": "clip",
    "distillation_alone": "alone",
}
MOVED: dict[str, dict[str, str]] = {
    "anchor": {"anchor_coef": "coef"},
    "entropy_target": {"entropy_target": "target", "entropy_coef_step": "coef_step", "entropy_coef_max": "coef_max"},
    "top_entropy": {"top_entropy_quantile": "quantile"},
    "covariance": {
        "covariance": "kind",
        "covariance_share": "share",
        "covariance_min": "low",
        "covariance_max": "high",
        "covariance_kl_coef": "kl_coef",
    },
    "trust_region": {"trust_region_top_k": "top_k"},
    "observations": {"observation_coef": "coef"},
    "demonstrations": {
        "demonstration_coef": "coef",
        "demonstration_coef_final": "coef_final",
        "demonstration_decay_rollouts": "decay_rollouts",
        "demonstration_weighting": "weighting",
    },
    "turn_returns": {"gamma": "gamma", "state_similarity": "state_similarity"},
    "gigpo": {
        name: name
        for name in ("gamma", "state_similarity", "step_weight", "episode_statistics", "invalid_action_penalty")
    },
    "distillation": DISTILLED,
    "self_distillation": {**DISTILLED, "teacher_weights": "weights", "teacher_rate": "rate"},
}
"""Term -> field of 0.3.0 -> field now."""
IMPLIED = {
    ("supervision", "process"): {"process"},
    ("supervision", "turn"): {"turn_returns", "gigpo"},
    ("supervision", "token"): {"distillation", "self_distillation"},
    ("turn_advantage", "gigpo"): {"gigpo"},
    ("turn_advantage", "returns"): {"turn_returns"},
}
"""Values of 0.3.0 that are a term now -> its name, one of these."""


def _assert_means(objective: Objective, given: dict[str, Any]) -> None:
    """The objective has the values that a configuration gives under the names of 0.3.0."""
    for name, value in given.items():
        if (name, value) in IMPLIED:
            assert IMPLIED[name, value] & objective.active_terms.keys(), name
            continue
        holders = [term for term, moved in MOVED.items() if name in moved and term in objective.active_terms]
        places = [(objective.active_terms[term], MOVED[term][name]) for term in holders] or [(objective, name)]
        assert [getattr(place, field) for place, field in places] == [value] * len(places), name


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
    assert given - fields == {field for moved in MOVED.values() for field in moved} | {name for name, _ in IMPLIED}
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
