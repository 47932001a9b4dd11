"""DPPO's trust region by the likeliest tokens: tokens that it masks, where the drawn one alone would not, by hand."""

import math
from typing import Any

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.top_k_trust_region import TopKTrustRegion
from grpo_pl.types import SamplingParams
from tests.objective.terms.one_completion import learned


def objective(top_k: int | None = 2, **fields: Any) -> GRPOAlgorithm:
    terms = {} if top_k is None else {"trust_region": TopKTrustRegion(top_k=top_k)}
    return GRPOAlgorithm(**preset_fields("dppo") | {"terms": terms} | fields)


DREW, NOW = torch.tensor([0.6, 0.3]), torch.tensor([0.7, 0.1])
"""Of the two likeliest tokens, the first of which was drawn; the rest goes from 0.1 to 0.2.

tv: ½ (0.1 + 0.2 + 0.1) = 0.2, of the drawn token alone 0.1. kl: 0.6 ln(6/7) + 0.3 ln 3 + 0.1 ln ½ = 0.168, of the drawn
token alone 0.6 ln(6/7) + 0.4 ln(4/3) = 0.0226."""


def at_three_places(algorithm: GRPOAlgorithm) -> Any:
    """The drawn token goes up with a good and a bad advantage, and stays at the third place."""
    still = [DREW.log().tolist()]
    likely = {
        "top_logprobs": [NOW.log().tolist()] * 2 + still,
        "sampling_top_logprobs": [DREW.log().tolist()] * 3,
        "top_is_drawn": [[True, False]] * 3,
    }
    drawn = [math.log(0.6)] * 3
    now = [math.log(0.7), math.log(0.7), math.log(0.6)]
    return learned(algorithm, now, advantages=[1.0, -1.0, 1.0], sampling_logprobs=drawn, **likely)


@pytest.mark.parametrize(
    ("fields", "outside"),
    [
        ({"epsilon_high": 0.15}, True),
        ({"epsilon_high": 0.21}, False),
        ({"surrogate": "dppo_kl", "epsilon_high": 0.16}, True),
        ({"surrogate": "dppo_kl", "epsilon_high": 0.17}, False),
    ],
)
def test_a_token_leaves_where_the_likeliest_ones_have_moved_too_far(fields: dict[str, Any], outside: bool) -> None:
    found, ratio = at_three_places(objective(**fields)), 7 / 6
    assert found.loss == pytest.approx((0.0 if outside else -ratio) + ratio - 1.0)
    assert found.slopes == pytest.approx([0.0 if outside else -ratio, ratio, -1.0])  # the second is called back
    assert found.sums["clip_ratio/high_mean"] == (float(outside), 3)
    assert found.sums["clip_ratio/low_mean"] == (0, 3)


@pytest.mark.parametrize("fields", [{"epsilon_high": 0.15}, {"surrogate": "dppo_kl", "epsilon_high": 0.05}])
def test_the_drawn_token_alone_would_have_stayed(fields: dict[str, Any]) -> None:
    assert at_three_places(objective(None, **fields)).slopes == pytest.approx([-7 / 6, 7 / 6, -1.0])
    assert at_three_places(objective(**fields)).slopes[0] == 0.0


def test_a_drawn_token_that_is_not_among_the_likeliest_counts_beside_them() -> None:
    """From 0.6, 0.1 and a rest of 0.3 to 0.4, 0.2 and 0.4: ½ (0.2 + 0.1 + 0.1) = 0.2."""
    given = {
        "top_logprobs": [[math.log(0.4)]],
        "sampling_top_logprobs": [[math.log(0.6)]],
        "top_is_drawn": [[False]],
        "sampling_logprobs": [math.log(0.1)],
    }
    slopes = [
        learned(objective(1, epsilon_high=high), [math.log(0.2)], advantage=1.0, **given).slopes
        for high in (0.19, 0.21)
    ]
    assert slopes == [[0.0], [pytest.approx(-2.0)]]


def test_it_needs_so_many_tokens_of_the_engine() -> None:
    assert objective(20).needs == objective(None).needs | Needs(top_logprobs=20)
    assert objective(20).skips_zeros
    with pytest.raises(ValueError, match="top_logprobs"):
        learned(objective(), [-1.0], sampling_logprobs=[-1.0])


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_token_to_compare_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k.*{top_k}"):
        TopKTrustRegion(top_k=top_k)


@pytest.mark.parametrize("surrogate", ["clip", "reinforce", "vespo"])
def test_a_surrogate_without_a_trust_region_is_refused(surrogate: Any) -> None:
    with pytest.raises(ValueError, match=f"TopKTrustRegion.*{surrogate}"):
        GRPOAlgorithm(surrogate=surrogate, terms={"trust_region": TopKTrustRegion(top_k=20)})


def test_a_run_in_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TopKTrustRegion.*model\.environment"):
        TopKTrustRegion(top_k=20).check_run(sampling=SamplingParams(), in_environment=True)
    TopKTrustRegion(top_k=20).check_run(sampling=SamplingParams(), in_environment=False)
