"""ECHO: the cross-entropy of observations by hand, beside the loss of the policy's own tokens."""

import math
from typing import Any

import pytest

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.objective.terms.echo import ECHO
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from grpo_pl.types import SamplingParams
from tests.objective.terms.one_completion import learned

OBJECTIVE = GRPOAlgorithm(beta=0.0, surrogate="unclipped", terms={"observations": ECHO(coef=0.3)})


def test_observations_have_their_own_mean_whatever_the_weights_of_the_policy_s_tokens() -> None:
    """Three of the batch's four observation tokens; the last token is padding."""
    found = learned(
        OBJECTIVE,
        [-1.0, -2.0, -4.0, -0.5, math.nan],
        advantage=2.0,
        weight=0.1,
        mask=[True, False, False, False, False],
        observation_weights=[0.0, 0.25, 0.25, 0.25, 0.0],
    )
    assert found.loss == pytest.approx(-0.1 * 2.0 + 0.3 * 0.25 * 6.5)
    assert found.slopes == pytest.approx([-0.2, -0.075, -0.075, -0.075, 0.0])
    assert found.sums["observation/nll"] == (6.5, 3)
    assert found.sums["ratio/mean"] == (1.0, 1)  # other metrics count the policy's tokens


def test_a_micro_batch_without_observations_adds_nothing() -> None:
    found = learned(OBJECTIVE, [-1.0], advantage=2.0, observation_weights=[0.0])
    assert found.loss == -2.0 and found.sums["observation/nll"] == (0, 0)


def test_it_needs_observations_and_every_completion() -> None:
    assert OBJECTIVE.needs == Needs(observations=True)
    assert not OBJECTIVE.skips_zeros  # a completion of advantage 0 has observations
    with pytest.raises(ValueError, match="observation_weights"):
        learned(OBJECTIVE, [-1.0])


def test_the_preset_weighs_them_by_a_tenth() -> None:
    (term,) = GRPOAlgorithm(**preset_fields("echo")).active_terms.values()
    assert term == ECHO(coef=0.1)


@pytest.mark.parametrize("coef", [0.0, -0.1, math.inf, math.nan])
def test_a_coefficient_that_is_no_weight_is_refused(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"ECHO.*coef.*{coef}"):
        ECHO(coef=coef)


def test_distributions_of_a_teacher_are_refused_beside_it_and_its_log_ratio_is_not() -> None:
    for teacher in (Distillation(divergence="reverse_kl"), SelfDistillation(weights="live", divergence="forward_kl")):
        for order in (1, -1):
            terms = dict([("observations", ECHO(coef=0.1)), ("teacher", teacher)][::order])
            with pytest.raises(ValueError, match=r"ECHO.*divergence"):
                GRPOAlgorithm(beta=0.0, terms=terms)
    GRPOAlgorithm(beta=0.0, terms={"observations": ECHO(coef=0.1), "teacher": Distillation()})


@pytest.mark.parametrize(
    ("sampling", "in_environment", "told"),
    [
        ({}, False, "model.environment"),
        ({"thinking_budget": 8}, True, "thinking_budget"),
    ],
)
def test_a_run_without_observations_of_an_environment_is_refused(
    sampling: dict[str, Any], in_environment: bool, told: str
) -> None:
    with pytest.raises(ValueError, match=f"ECHO.*{told}"):
        ECHO(coef=0.1).check_run(sampling=SamplingParams(**sampling), in_environment=in_environment)
    ECHO(coef=0.1).check_run(sampling=SamplingParams(), in_environment=True)
