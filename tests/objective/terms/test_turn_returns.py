"""Turn returns: each turn's advantage by hand, spread over its tokens, and the objectives that it contradicts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Turns
from grpo_pl.objective.terms.process import ProcessSupervision
from grpo_pl.objective.terms.turn_returns import TurnReturns
from grpo_pl.types import NO_TURN, SamplingParams
from tests.objective.terms.one_completion import collected, learned

NO = NO_TURN
EPISODES = Turns(
    rewards=torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]], dtype=torch.float64),
    present=torch.tensor([[True, True], [True, True], [True, False]]),
    invalid_actions=torch.zeros(3, 2, dtype=torch.bool),
    states=[("start", "the left room"), ("start", "the left rooms"), ("start",)],
    index=torch.tensor([[0, 0, NO, 1, 1], [0, NO, 1, 1, NO], [0, NO, NO, NO, NO]]),
)
"""Three episodes of one group, with returns-to-go of 1 and 1; ½ and 0; 0."""


def credited(term: TurnReturns, valid: tuple[bool, ...] = (True, True, True), **fields: Any) -> Tensor:
    algorithm = objective(term, **fields)
    more = {"turns": EPISODES, "valid": torch.tensor(valid)}
    return term.credit(collected(algorithm, EPISODES.index >= 0, advantages=[[9.0]] * 3, more=more))


def objective(term: TurnReturns, **fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(**{"group_size": 3, "beta": 0.0, "scale": "none", **fields}, terms={"turns": term})


LEAVING = {"baseline": "leave_one_out"}


@pytest.mark.parametrize(
    ("arguments", "fields", "valid", "by_turn"),
    [
        # from the start 1 − ¼, ½ − ½ and 0 − ¾; nobody else was in a second state: 1 − ¼ and 0 − ½ of the episodes
        ({}, LEAVING, (True,) * 3, [[0.75, 0.75], [0.0, -0.5], [-0.75, 0.0]]),
        ({}, {}, (True,) * 3, [[0.5, 0.5], [0.0, -0.5], [-0.5, 0.0]]),  # less the mean of all
        ({"gamma": 0.5}, LEAVING, (True,) * 3, [[0.25, 0.75], [0.25, -0.25], [-0.5, 0.0]]),
        ({"gamma": 0.0}, LEAVING, (True,) * 3, [[-0.25, 0.75], [0.5, 0.0], [-0.25, 0.0]]),
        ({}, LEAVING, (True, True, False), [[0.5, 0.5], [-0.5, -1.0], [0.0, 0.0]]),  # the last has no reward
        ({"state_similarity": 0.95}, LEAVING, (True,) * 3, [[0.75, 1.0], [0.0, -1.0], [-0.75, 0.0]]),
        ({"state_similarity": 1.0}, LEAVING, (True,) * 3, [[0.75, 0.75], [0.0, -0.5], [-0.75, 0.0]]),
    ],
)
def test_a_turn_has_its_return_less_what_others_got_from_its_state(
    arguments: dict[str, Any], fields: dict[str, Any], valid: tuple[bool, ...], by_turn: list[list[float]]
) -> None:
    (a, b), (c, d), (e, _) = by_turn
    tokens = [a, a, 0.0, b, b], [c, 0.0, d, d, 0.0], [e, 0.0, 0.0, 0.0, 0.0]
    found = credited(TurnReturns(**arguments), valid, **fields)
    assert found.flatten().tolist() == pytest.approx([value for row in tokens for value in row])


def test_the_loss_takes_the_advantage_of_each_token_s_turn() -> None:
    term = TurnReturns()
    advantages = credited(term)[0].tolist()
    found = learned(objective(term), [-1.0] * 5, advantages=advantages, mask=[True, True, False, True, True])
    assert found.slopes == pytest.approx([-0.5, -0.5, 0.0, -0.5, -0.5])


def test_advantages_keep_the_precision_of_those_of_completions() -> None:
    term = TurnReturns()
    of_rollout = collected(
        objective(term),
        EPISODES.index >= 0,
        advantages=torch.zeros(3, 1),
        more={"turns": EPISODES, "valid": torch.ones(3, dtype=torch.bool)},
    )
    single = {**of_rollout.tokens, "advantages": torch.zeros(3, 1, dtype=torch.float32)}
    assert term.credit(type(of_rollout)(**{**vars(of_rollout), "tokens": single})).dtype == torch.float32


def test_it_needs_turns_and_may_learn_from_groups_of_equal_rewards() -> None:
    algorithm = objective(TurnReturns())
    assert algorithm.needs == Needs(turns=True)
    assert algorithm.skips_zeros  # an episode whose turns all have 0
    equal = algorithm.advantages(
        values=torch.ones(1, 1, 3),
        reward_weights=torch.ones(1),
        lengths=torch.full((1, 3), 5),
        truncated=torch.zeros(1, 3, dtype=torch.bool),
    )
    assert equal.active.all() and not equal.advantages.any()  # which `credit` has not made yet


def test_the_preset_leaves_the_episode_itself_out() -> None:
    algorithm = GRPOAlgorithm(**preset_fields("turn_returns"))
    assert list(algorithm.active_terms.values()) == [TurnReturns()] and algorithm.baseline == "leave_one_out"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(({"gamma": gamma}, f"gamma.*{gamma}") for gamma in (1.5, -0.1)),
        *(({"state_similarity": ratio}, f"state_similarity.*{ratio}") for ratio in (0.0, 1.01)),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TurnReturns(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"baseline": "batch_mean"}, "baseline leave_one_out or group_mean"),
        ({"scale": "group_std"}, "scale none"),
        ({"overlong_buffer": 0.1}, "overlong_buffer 0"),
        ({"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}, "kl_placement loss"),
        ({"reward_aggregation": "normalize_then_sum", "scale": "none"}, "scale group_std"),
        ({"reward_aggregation": "normalize_then_sum", "scale": "group_std"}, "sum_then_normalize"),
        ({"ratio_level": "geometric"}, "ratio_level token or sequence"),
        ({"max_rewards": True}, "baseline none"),
        ({"surrogate": "nll", "samples": "correct", "baseline": "none"}, "surrogate nll"),
    ],
)
def test_an_objective_that_it_contradicts_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        objective(TurnReturns(), **fields)


def test_two_terms_that_make_the_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match="TurnReturns and ProcessSupervision"):
        GRPOAlgorithm(scale="none", terms={"turns": TurnReturns(), "steps": ProcessSupervision()})


def test_sensible_combinations_are_accepted() -> None:
    objective(TurnReturns(), ratio_level="sequence", dynamic_sampling=True)
    objective(TurnReturns(gamma=0.0, state_similarity=1.0), baseline="leave_one_out")


def test_a_run_without_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TurnReturns.*model\.environment"):
        TurnReturns().check_run(sampling=SamplingParams(), in_environment=False)
    TurnReturns().check_run(sampling=SamplingParams(), in_environment=True)
