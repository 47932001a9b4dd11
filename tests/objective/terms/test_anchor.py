"""The anchor: hand-computed loss and slopes beside DPPO, and what it needs."""

import math

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.anchor import Anchor
from tests.losses import loss_of_tokens


def test_it_adds_the_squared_log_ratio_to_what_drew_the_tokens() -> None:
    """Beside DPPO as in prime-rl's default loss, token by token; a masked token of the policy term keeps its anchor."""
    algorithm = GRPOAlgorithm(**preset_fields("dppo") | {"entropy_coef": 0.0, "terms": {"anchor": Anchor(coef=0.3)}})
    drawn = [-1.0, -0.7, -2.3]
    now = torch.tensor([[-1.2, -0.2, -2.0]], dtype=torch.float64, requires_grad=True)  # the second is too high
    output = loss_of_tokens(
        algorithm,
        logprobs=now,
        advantages=torch.tensor([[2.0]], dtype=torch.float64),
        sampling_logprobs=torch.tensor([drawn], dtype=torch.float64),
        mask=torch.ones(1, 3, dtype=torch.bool),
        weights=torch.full((1, 3), 0.5, dtype=torch.float64),
    )
    expected, slopes = 0.0, []
    for lp, mu in zip(now[0].tolist(), drawn, strict=True):
        inside = math.exp(lp) - math.exp(mu) <= 0.15
        expected += 0.5 * (-2.0 * math.exp(lp - mu) * inside + 0.3 * (lp - mu) ** 2)
        slopes.append(0.5 * (-2.0 * math.exp(lp - mu) * inside + 0.6 * (lp - mu)))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected, rel=1e-10)
    assert now.grad is not None and now.grad[0].tolist() == pytest.approx(slopes, rel=1e-10)
    assert output.stats["sampling/anchor"][0].item() == pytest.approx(0.04 + 0.25 + 0.09)


def test_it_needs_what_drew_the_tokens_and_every_completion() -> None:
    plain, anchored = GRPOAlgorithm(beta=0.0), GRPOAlgorithm(beta=0.0, terms={"anchor": Anchor(coef=0.1)})
    assert anchored.needs == Needs(sampling_logprobs=True) and plain.needs == Needs()
    assert plain.skips_zeros and not anchored.skips_zeros  # advantage 0 has a gradient of the anchor


@pytest.mark.parametrize("coef", [0.0, -0.1, math.inf, math.nan])
def test_a_coefficient_that_is_no_weight_is_refused(coef: float) -> None:
    with pytest.raises(ValueError, match=f"Anchor needs a coef above 0 and finite, got {coef}"):
        Anchor(coef=coef)
