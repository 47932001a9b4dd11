"""Process supervision: the advantage of each token from the steps that end behind it, by hand."""

import math
from typing import Any

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.process import ProcessSupervision
from grpo_pl.types import SamplingParams
from tests.objective.terms.one_completion import collected, learned

NAN = math.nan
VALUES = torch.tensor([[1.0, 0.25], [0.25, NAN], [2.0, NAN], [2.0, 2.0]], dtype=torch.float64)
ENDS = torch.tensor([[1, 3], [2, 0], [0, 0], [1, 2]])
"""Two groups of two: steps of 1, ¼ and ¼, less their mean ½, a step; and equal ones."""


def objective(**fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(**{"group_size": 2, "beta": 0.0, **fields}, terms={"steps": ProcessSupervision()})


def credited(**fields: Any) -> list[float]:
    kept = torch.ones(4, 5, dtype=torch.bool)
    of_rollout = collected(objective(**fields), kept, advantages=[[9.0]] * 4, more={"steps": (VALUES, ENDS)})
    found: list[float] = ProcessSupervision().credit(of_rollout).flatten().tolist()
    return found


CENTRED = [0.25, 0.25, -0.25, -0.25, 0.0] + [-0.25, -0.25, -0.25, 0.0, 0.0] + [0.0] * 10


@pytest.mark.parametrize(
    ("fields", "divisor"),
    [
        ({"scale": "none"}, 1.0),
        ({}, math.sqrt(0.375 / 2) + 1e-5),  # (½² + ¼² + ¼²) / 2
        ({"std_ddof": 0, "std_eps": 0.5}, math.sqrt(0.375 / 3) + 0.5),
    ],
)
def test_a_token_has_the_steps_that_end_at_or_behind_it(fields: dict[str, Any], divisor: float) -> None:
    assert credited(**fields) == pytest.approx([value / divisor for value in CENTRED])


def test_the_loss_takes_the_advantage_of_each_token() -> None:
    found = learned(objective(scale="none"), [-1.0] * 5, advantages=CENTRED[:5])
    assert found.slopes == pytest.approx([-0.25, -0.25, 0.25, 0.25, 0.0])


def test_an_infinite_reward_of_a_step_is_refused() -> None:
    infinite = collected(
        objective(), torch.ones(2, 3, dtype=torch.bool), more={"steps": (torch.full((2, 1), math.inf), ENDS[:2, :1])}
    )
    with pytest.raises(ValueError, match="infinite"):
        ProcessSupervision().credit(infinite)


def test_it_needs_rewards_of_steps_and_may_learn_from_groups_of_equal_outcomes() -> None:
    algorithm = objective()
    assert algorithm.needs == Needs(step_rewards=True)
    assert algorithm.skips_zeros
    equal = algorithm.advantages(
        values=torch.ones(1, 1, 2),
        reward_weights=torch.ones(1),
        lengths=torch.full((1, 2), 5),
        truncated=torch.zeros(1, 2, dtype=torch.bool),
    )
    assert equal.active.all() and not equal.advantages.any()  # which `credit` has not made yet


def test_the_preset_has_it() -> None:
    assert list(GRPOAlgorithm(**preset_fields("grpo_process")).active_terms.values()) == [ProcessSupervision()]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"baseline": "leave_one_out"}, "baseline group_mean"),
        ({"scale": "batch_std"}, "group_std or none"),
        ({"overlong_buffer": 0.1}, "overlong_buffer 0"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}, "kl_placement loss"),
        ({"reward_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
        ({"dynamic_sampling": True}, "dynamic_sampling"),
        ({"ratio_level": "geometric"}, "ratio_level token or sequence"),
        ({"surrogate": "nll", "samples": "correct", "baseline": "none", "scale": "none"}, "surrogate nll"),
    ],
)
def test_an_objective_that_it_contradicts_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        objective(**fields)


def test_sensible_combinations_are_accepted() -> None:
    objective(ratio_level="sequence")  # GSPO-token: advantages of their own per token
    objective(scale="none", mask_truncated=True, num_iterations=2)


def test_a_run_in_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ProcessSupervision.*model\.environment"):
        ProcessSupervision().check_run(sampling=SamplingParams(), in_environment=True)
    ProcessSupervision().check_run(sampling=SamplingParams(), in_environment=False)
