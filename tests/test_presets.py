"""Three rollouts of the quickstart under every preset, with a smaller model and shorter sums; grpo's is the teacher.

Four are trained by default: one that samples again, one with steps, one with a teacher, and GRPO. The loss and gradient
of every preset are held by tests/objective/test_algorithm.py.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_pl.config.presets import preset_fields, presets
from tests.conftest import TINY_POLICY

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PRESETS = [name for name in presets() if name not in ("echo", "gigpo", "turn_returns")]  # those need an environment
SMALL: dict[str, Any] = {
    "trainer": {"val_check_interval": 3},
    "model": {
        "policy": {"from_scratch": {**TINY_POLICY, "max_position_embeddings": 96}},
        "cold_start": {"steps": 80, "batch_size": 16, "lr": 0.01},
        "algorithm": {"group_size": 4, "num_iterations": 2},  # with one update, clips and ratios would be idle
        "sampling": {"max_completion_length": 24},
        "validation": {"samples": 1, "greedy": False},
    },
    "data": {
        "source": {"init_args": {"digits": 1, "min_digits": 1}},
        "steps": 3,
        "prompts_per_step": 8,
        "val_prompts": 2,
    },
}
TRAINED = ("grpo", "dapo", "grpo_process", "gkd")


def _slow_but_trained(names: Sequence[str]) -> list[Any]:
    return [name if name in TRAINED else pytest.param(name, marks=pytest.mark.slow) for name in names]


TAUGHT = ("distill", "distill_and_reward", "gkd")
CORRECTNESS_ALONE = {
    "model": {"rewards": [{"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}}]}
}
"""MaxRL's rewards are 0 and 1; those of the quickstart's format are 0.1 apart."""
SHORT_TEXTS = {"sdft": "{answer}", "opsd": "{answer}", "rlsd": "{answer}", "sdpo": "{feedback}"}
"""Short privileged texts, for the small policy's context of 96 characters."""


@dataclass(frozen=True)
class Fitted:
    steps: list[dict[str, float]]
    moved: dict[str, bool]


@pytest.fixture(scope="module")
def fit(command_line: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Fitted]:
    """All presets start from one cold start, which the first of them makes."""
    here = type(command_line)(tmp_path_factory.mktemp("presets"))
    small = here.folder / "small.yaml"
    small.write_text(yaml.safe_dump(SMALL))
    alone = here.folder / "alone.yaml"
    alone.write_text(yaml.safe_dump(CORRECTNESS_ALONE))

    @cache
    def run(preset: str) -> Fitted:
        overlays = [CONFIGS / "quickstart.yaml", CONFIGS / "algorithm" / f"{preset}.yaml", small]
        overlays += [alone] if preset == "maxrl" else []
        if preset in SHORT_TEXTS:
            privileged = {"user": "{question}{privileged}", "texts": [SHORT_TEXTS[preset]]}
            overlays.append(here.folder / f"{preset}.yaml")
            overlays[-1].write_text(yaml.safe_dump({"model": {"privileged": privileged}}))
        teacher = []
        if preset in TAUGHT:
            run("grpo")
            teacher = [f"--model.teacher.path={here.runs / 'grpo' / 'export'}"]
        outcome = here("fit", *(f"--config={file}" for file in overlays), f"--name={preset}", *teacher)
        assert outcome.status == 0, outcome.err
        with (here.runs / preset / "metrics.csv").open(newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        (start,) = here.cache.glob("cold_start/*/model.safetensors")
        before, after = load_file(start), load_file(here.runs / preset / "export" / "model.safetensors")
        assert before.keys() == after.keys()
        moved = {name: not torch.equal(tensor, after[name]) for name, tensor in before.items()}
        return Fitted([row for row in rows if "reward" in row], moved)

    return run


@pytest.mark.parametrize("preset", _slow_but_trained(PRESETS))
def test_three_rollouts_are_finite_and_move_every_weight(fit: Callable[[str], Fitted], preset: str) -> None:
    fitted = fit(preset)
    assert [row["step"] for row in fitted.steps] == [1, 2, 3]
    for row in fitted.steps:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["grad_norm"] > 0
        assert row["updates/skipped"] == 0
        assert row["entropy"] > 0
        assert 0 < row["rewards/math/mean"] < 1  # something to tell apart
        assert ("kl" in row) == (preset_fields(preset)["beta"] > 0)
        assert abs(row["ratio/mean"] - 1) > 1e-6  # the second pass compares to the first
        for key in ("loss", "reward_std", "completions/mean_length_correct", "completions/mean_length_wrong"):
            assert key in row
    assert [name for name, moved in fitted.moved.items() if not moved] == []


def test_dynamic_sampling_leaves_no_group_of_equal_rewards(fit: Callable[[str], Fitted]) -> None:
    steps = fit("dapo").steps
    assert sum(row["samples/resample_attempts"] for row in steps) > 0
    assert all(row["frac_reward_zero_std"] == 0 for row in steps)


@pytest.mark.slow
def test_expert_iteration_learns_from_correct_completions_alone(fit: Callable[[str], Fitted]) -> None:
    for row in fit("expert_iteration").steps:
        assert row["samples/dropped"] == round(32 * (1 - row["rewards/math/mean"]))


@pytest.mark.parametrize("preset", _slow_but_trained(TAUGHT))
def test_what_a_teacher_finds_is_logged(fit: Callable[[str], Fitted], preset: str) -> None:
    """The same policy in all: `grpo` has moved three rollouts away from it."""
    key = "teacher/divergence" if preset == "gkd" else "teacher/kl"
    for row in fit(preset).steps:
        assert 0 < row[key] < 0.1
        assert row["time/teacher"] > 0
        assert row["samples/dropped"] == 0
    assert "time/teacher" not in fit("grpo").steps[0]


def test_process_supervision_sees_steps(fit: Callable[[str], Fitted]) -> None:
    outcome, process = fit("grpo").steps, fit("grpo_process").steps
    assert "rewards/columns/mean" in process[0]
    assert process[0]["rewards/math/mean"] == outcome[0]["rewards/math/mean"]  # one policy, one seed
    assert process[0]["grad_norm"] != outcome[0]["grad_norm"]
