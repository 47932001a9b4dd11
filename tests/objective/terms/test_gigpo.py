"""GiGPO: an episode's and a turn's advantage by hand, what an invalid action costs, and what it contradicts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Turns
from grpo_pl.objective.terms.gigpo import GiGPO
from grpo_pl.objective.terms.turn_returns import TurnReturns
from grpo_pl.types import NO_TURN, SamplingParams
from tests.objective.terms.one_completion import collected

NO = NO_TURN
INDEX = torch.tensor([[0, NO, 1], [0, NO, 1], [0, NO, NO]])
"""Three episodes of one group; the tokens of their turns."""


def objective(term: GiGPO, **fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(**{"group_size": 3, "beta": 0.0, "scale": "none", **fields}, terms={"turns": term})


def credited(term: GiGPO, valid: tuple[bool, ...], invalid: tuple[int, int] | None, **fields: Any) -> Tensor:
    """Of episodes with rewards 0 and 1; ½ and 0; 0. All begin in one state, and no second state is shared."""
    wrong = torch.zeros(3, 2, dtype=torch.bool)
    if invalid is not None:
        wrong[invalid] = True
    turns = Turns(
        rewards=torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]], dtype=torch.float64),
        present=torch.tensor([[True, True], [True, True], [True, False]]),
        invalid_actions=wrong,
        states=[("start", "left"), ("start", "right"), ("start",)],
        index=INDEX,
    )
    more = {"turns": turns, "valid": torch.tensor(valid)}
    return term.credit(collected(objective(term, **fields), INDEX >= 0, advantages=[[9.0]] * 3, more=more))


ALL = (True, True, True)
DEVIATION = 0.5 / (0.5 + 1e-5)  # of 1, ½ and 0: ½, with std_eps


@pytest.mark.parametrize(
    ("arguments", "valid", "invalid", "fields", "by_turn"),
    [
        # the episodes' totals 1, ½, 0 less ½; the same of the first turns' returns; a second turn is alone
        ({}, ALL, None, {}, [1.0, 0.5, 0.0, 0.0, -1.0]),
        ({"step_weight": 0.5}, ALL, None, {}, [0.75, 0.5, 0.0, 0.0, -0.75]),
        ({"step_weight": 0.0}, ALL, None, {}, [0.5, 0.5, 0.0, 0.0, -0.5]),
        # returns ½, ½, 0 from the start less a third; totals are not discounted
        ({"gamma": 0.5}, ALL, None, {}, [0.5 + 1 / 6, 0.5, 1 / 6, 0.0, -0.5 - 1 / 3]),
        ({}, ALL, None, {"scale": "group_std"}, [2 * DEVIATION, DEVIATION, 0.0, 0.0, -2 * DEVIATION]),
        # totals 1, 1, ½, ½, 0 of the turns have the mean 0.6
        ({"episode_statistics": "steps"}, ALL, None, {}, [0.9, 0.4, -0.1, -0.1, -1.1]),
        # an invalid second turn pays by its episode's part alone, and the turn before does not
        ({"invalid_action_penalty": 0.1}, ALL, (1, 1), {}, [1.0, 0.5, 0.0, -0.1, -1.0]),
        # an invalid first turn is worth 0.4 among 1, 0.4 and 0
        (
            {"invalid_action_penalty": 0.1},
            ALL,
            (1, 0),
            {},
            [0.5 + 1 - 1.4 / 3, 0.5, -0.1 + 0.4 - 1.4 / 3, 0.0, -0.5 - 1.4 / 3],
        ),
        ({}, ALL, (1, 0), {}, [1.0, 0.5, 0.0, 0.0, -1.0]),  # which costs nothing by default
        ({}, (True, True, False), None, {}, [0.5, 0.25, -0.5, -0.25, 0.0]),  # the last has no reward
    ],
)
def test_a_turn_has_its_episode_s_advantage_and_its_own(
    arguments: dict[str, Any],
    valid: tuple[bool, ...],
    invalid: tuple[int, int] | None,
    fields: dict[str, Any],
    by_turn: list[float],
) -> None:
    a, b, c, d, e = by_turn
    found = credited(GiGPO(**arguments), valid, invalid, **fields)
    assert found.flatten().tolist() == pytest.approx([a, 0.0, b, c, 0.0, d, e, 0.0, 0.0])


def test_it_needs_turns() -> None:
    algorithm = objective(GiGPO())
    assert algorithm.needs == Needs(turns=True)
    assert algorithm.skips_zeros


def test_the_preset_has_the_discount_and_the_penalty_of_its_authors() -> None:
    (term,) = GRPOAlgorithm(**preset_fields("gigpo")).active_terms.values()
    assert term == GiGPO(gamma=0.95, invalid_action_penalty=0.1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(({"gamma": gamma}, f"gamma.*{gamma}") for gamma in (1.5, -0.1)),
        *(({"state_similarity": ratio}, f"state_similarity.*{ratio}") for ratio in (0.0, 1.01)),
        *(({"step_weight": weight}, f"step_weight.*{weight}") for weight in (-1.0, math.inf, math.nan)),
        *(({"invalid_action_penalty": fine}, f"invalid_action_penalty.*{fine}") for fine in (-0.1, math.inf)),
        ({"episode_statistics": "turns"}, "statistics.*turns"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GiGPO(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"baseline": "leave_one_out"}, "baseline group_mean"),
        ({"scale": "batch_std"}, "none or group_std"),
        ({"scale": "group_std", "std_ddof": 0}, "std_ddof 1"),
        ({"overlong_buffer": 0.1}, "overlong_buffer 0"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}, "kl_placement loss"),
        ({"reward_aggregation": "normalize_then_sum", "scale": "group_std"}, "sum_then_normalize"),
        ({"ratio_level": "geometric"}, "ratio_level token or sequence"),
        ({"surrogate": "nll", "samples": "correct", "baseline": "none"}, "surrogate nll"),
    ],
)
def test_an_objective_that_it_contradicts_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        objective(GiGPO(), **fields)


def test_two_terms_that_make_the_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match="GiGPO and TurnReturns"):
        GRPOAlgorithm(scale="none", terms={"turns": GiGPO(), "returns": TurnReturns()})


def test_sensible_combinations_are_accepted() -> None:
    objective(GiGPO(invalid_action_penalty=0.1, episode_statistics="steps"), scale="group_std")
    objective(GiGPO(), std_ddof=0)


def test_a_run_without_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GiGPO.*model\.environment"):
        GiGPO().check_run(sampling=SamplingParams(), in_environment=False)
    GiGPO().check_run(sampling=SamplingParams(), in_environment=True)
