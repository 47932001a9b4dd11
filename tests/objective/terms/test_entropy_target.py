"""The entropy target: the weight of the bonus by hand, rollout by rollout, and across checkpoints."""

import json
import math
from typing import Any

import pytest

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.entropy_target import EntropyTarget
from grpo_pl.objective.terms.states import TermStates
from tests.objective.terms.one_completion import learned


def objective(coefficient: float = 0.0, **fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(beta=0.0, entropy_coef=coefficient, terms={"entropy_target": EntropyTarget(**fields)})


def observed(states: TermStates, algorithm: GRPOAlgorithm, **means: float) -> float:
    """The weight that is logged after a rollout."""
    states.observe(algorithm, lambda: means)
    return states.metrics(algorithm)["entropy_coef"]


def test_the_weight_grows_up_to_its_bound_while_entropy_is_low_and_falls_to_zero_above() -> None:
    algorithm, states = objective(target=0.3, coef_step=0.01, coef_max=0.025), TermStates()
    assert states.metrics(algorithm) == {}
    found = [observed(states, algorithm, entropy=entropy) for entropy in (0.2, 0.3, 0.1, 0.31, 0.5, 0.5, 0.2)]
    assert found == pytest.approx([0.01, 0.02, 0.025, 0.015, 0.005, 0.0, 0.01], abs=1e-12)


@pytest.mark.parametrize(("entropy", "applied"), [(None, 0.02), (0.2, 0.02), (0.3, 0.02), (0.3001, 0.0)])
def test_the_bonus_is_on_while_the_last_entropy_is_at_most_the_target(entropy: float | None, applied: float) -> None:
    algorithm = objective(0.5, target=0.3)
    state = {"coefficient": 0.02} | ({} if entropy is None else {"entropy": entropy})
    assert EntropyTarget(target=0.3).adapted(algorithm, state).entropy_coef == applied


def test_the_objective_gets_the_weight_of_its_rollout() -> None:
    algorithm, states = objective(0.02, target=0.5, coef_step=0.01), TermStates()
    assert states.adapted(algorithm) == algorithm
    assert observed(states, algorithm, entropy=0.4) == pytest.approx(0.03)
    assert states.adapted(algorithm).entropy_coef == pytest.approx(0.03)
    for nothing in ({}, {"entropy": math.nan}, {"entropy": math.inf}):  # no update, or one of nothing
        assert observed(states, algorithm, **nothing) == pytest.approx(0.03)
    assert observed(states, algorithm, entropy=0.6) == pytest.approx(0.02)
    off = states.adapted(algorithm)
    assert off.entropy_coef == 0.0 and algorithm.entropy_coef == 0.02
    assert off.needs.entropy  # also where the weight is 0: the next rollout may need it


def test_its_weight_is_that_of_the_entropy_in_the_loss() -> None:
    algorithm, states = objective(target=0.5, coef_step=0.1), TermStates()
    observed(states, algorithm, entropy=0.4)
    found = learned(states.adapted(algorithm), [-1.0], advantage=2.0, weight=0.5, entropy=[3.0])
    assert found.loss == pytest.approx(0.5 * (-2.0 - 0.1 * 3.0))
    assert found.sums["entropy"] == (3.0, 1)


def test_what_it_remembers_goes_through_a_checkpoint() -> None:
    algorithm, states, twin = objective(target=0.5, coef_step=0.01), TermStates(), TermStates()
    observed(states, algorithm, entropy=0.4)
    twin.load_state_dict(json.loads(json.dumps({"terms": states.state_dict()})))
    assert twin.adapted(algorithm) == states.adapted(algorithm) != algorithm
    assert observed(twin, algorithm, entropy=0.4) == observed(states, algorithm, entropy=0.4) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("earlier", "coefficient"),
    [
        ({"coefficient": 0.25, "entropy": 0.1}, 0.25),
        ({"coefficient": 0.25, "entropy": 0.4}, 0.0),
        ({"coefficient": None, "entropy": None}, 0.0625),  # saved before the first rollout
    ],
)
def test_a_checkpoint_of_version_0_3_goes_on(earlier: dict[str, Any], coefficient: float) -> None:
    states = TermStates()
    states.load_state_dict({"entropy_control": earlier})
    assert states.adapted(objective(0.0625, target=0.3)).entropy_coef == coefficient


def test_a_weight_above_a_limit_that_was_lowered_since_is_that_limit() -> None:
    states = TermStates()
    states.load_state_dict({"terms": {"entropy_target": {"coefficient": 0.5, "entropy": 0.1}}})
    assert states.adapted(objective(target=0.3, coef_max=0.2)).entropy_coef == 0.2


def test_it_needs_entropies_and_every_completion() -> None:
    algorithm = objective(target=0.5)
    assert algorithm.needs == Needs(entropy=True)
    assert not algorithm.skips_zeros
    with pytest.raises(ValueError, match="entropy"):
        learned(algorithm, [-1.0])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(({"target": target}, f"target.*{target}") for target in (0.0, -1.0, math.inf, math.nan)),
        *(({"coef_step": step}, f"coef_step.*{step}") for step in (-1.0, 0.0, 2.0, math.nan)),  # at most coef_max
        *(({"coef_max": most}, f"coef_max.*{most}") for most in (0.0, math.inf)),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EntropyTarget(**{"target": 1.0, **fields})


def test_a_first_weight_above_its_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy_coef=2\.0.*coef_max=1\.0"):
        objective(2.0, target=1.0)
    objective(1.0, target=1.0)
