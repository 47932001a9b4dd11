"""CHORD: the share of demonstrations and the loss of their tokens by hand; the rollout's own loss stays."""

import math
from typing import Any

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.chord import CHORD
from tests.objective.terms.one_completion import learned


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"coef": 0.3}, {0: 0.3, 9: 0.3}),  # stays unless it decays
        ({"coef": 0.8, "decay_rollouts": 2}, {0: 0.8, 1: 0.4, 2: 0.0, 3: 0.0}),
        (
            {"coef": 0.9, "coef_final": 0.05, "decay_rollouts": 200},
            {0: 0.9, 50: 0.05 + 0.425 * (1 + math.sqrt(0.5)), 100: 0.475, 200: 0.05, 999: 0.05},
        ),
    ],
)
def test_the_share_of_demonstrations_falls_by_half_a_cosine(fields: dict[str, Any], shares: dict[int, float]) -> None:
    assert {rollout: CHORD(**fields).share(rollout) for rollout in shares} == pytest.approx(shares)


@pytest.mark.parametrize(
    ("weighting", "losses", "slopes"),
    [
        ("equal", [math.log(2), math.log(10)], [-1.0, -1.0]),
        ("uncertain", [0.25 * math.log(2), 0.09 * math.log(10)], [-0.25, -0.09]),  # π (1 − π), without a gradient
    ],
)
def test_a_token_of_a_demonstration_counts_by_its_weighting(
    weighting: Any, losses: list[float], slopes: list[float]
) -> None:
    logprobs = torch.tensor([0.5, 0.1], dtype=torch.float64).log().requires_grad_()
    found = CHORD(coef=0.5, weighting=weighting).losses(logprobs)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx(losses) and gradient.tolist() == pytest.approx(slopes)


def test_it_asks_for_demonstrations_and_leaves_the_tokens_of_the_rollout_alone() -> None:
    term = CHORD(coef=0.5)
    plain, beside = GRPOAlgorithm(beta=0.0), GRPOAlgorithm(beta=0.0, terms={"demonstrations": term})
    assert beside.needs == Needs(demonstrations=term) and plain.needs == Needs()
    assert beside.skips_zeros  # demonstrations need no completion of the rollout
    assert learned(beside, [-1.0, -2.0], advantage=2.0) == learned(plain, [-1.0, -2.0], advantage=2.0)


def test_the_preset_begins_at_nine_tenths() -> None:
    (term,) = GRPOAlgorithm(**preset_fields("chord")).active_terms.values()
    assert term == CHORD(coef=0.9, coef_final=0.05, decay_rollouts=200)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"coef": 0.0}, r"\bcoef\b.*0\.0"),
        ({"coef": -0.1}, r"\bcoef\b.*-0\.1"),
        ({"coef": 1.5}, r"\bcoef\b.*1\.5"),
        ({"coef": math.nan}, r"\bcoef\b.*nan"),
        ({"coef": 0.5, "coef_final": -0.1, "decay_rollouts": 9}, r"coef_final.*-0\.1"),
        ({"coef": 0.5, "coef_final": 1.1, "decay_rollouts": 9}, r"coef_final.*1\.1"),
        ({"coef": 0.5, "decay_rollouts": -1}, "decay_rollouts.*-1"),
        ({"coef": 0.5, "coef_final": 0.1}, "coef_final.*decay_rollouts"),  # a final share that nothing leads to
        ({"coef": 0.5, "weighting": "phi"}, "weighting.*phi"),
    ],
)
def test_shares_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CHORD(**fields)
