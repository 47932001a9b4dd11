"""Clip-Cov and KL-Cov: the tokens that they choose, and what these lose or pay, by hand."""

import math
from typing import Any

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.functional.sampling import row_key
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.covariance import Covariance
from grpo_pl.objective.terms.distillation import Distillation
from tests.objective.terms.one_completion import collected, learned

LOGPROBS = [[0.0, -3.0, math.nan], [-3.0, -6.0, -9.0]]
ADVANTAGES = [[1.0, 1.0, math.nan], [1.0, -1.0, 7.0]]
KEPT = [[True, True, False], [True, True, False]]
"""The kept ones' products are (3)(½), (0)(½), (0)(½) and (−3)(−1½): 1.5, 0, 0 and 4.5."""


def objective(**fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(beta=0.0, surrogate="unclipped", terms={"covariance": Covariance(**fields)})


def chosen(*, step: int = 0, **fields: Any) -> list[list[bool]]:
    algorithm = objective(**fields)
    found = Covariance(**fields).prepare(
        collected(algorithm, KEPT, step=step, old_logprobs=LOGPROBS, advantages=ADVANTAGES)
    )
    assert found.keys() == {"covariance_mask"}
    mask: list[list[bool]] = found["covariance_mask"].tolist()
    return mask


FIRST, LAST, BOTH = (
    [[first, False, False], [False, last, False]] for first, last in ((True, False), (False, True), (True, True))
)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"kind": "kl", "share": 0.25}, LAST),  # the highest
        ({"kind": "kl", "share": 0.5}, BOTH),
        ({"kind": "kl"}, LAST),  # one at least
        ({"kind": "kl", "share": 0.25, "low": 4.6, "high": 9.0}, LAST),  # whose bounds are clip's
        ({"kind": "clip", "share": 0.25, "high": 4.0}, FIRST),
        ({"kind": "clip", "share": 0.25, "low": 2.0}, LAST),
        ({"kind": "clip", "share": 1.0}, BOTH),  # fewer than the share where fewer lie between
        ({"kind": "clip", "share": 1.0, "low": 5.0, "high": 9.0}, [[False] * 3] * 2),
    ],
)
def test_tokens_are_chosen_by_their_covariance_over_the_kept_ones(fields: dict[str, Any], tokens: Any) -> None:
    assert chosen(**fields) == tokens


def test_clip_draws_among_its_candidates_anew_in_each_step_and_the_same_again_in_a_repeated_one() -> None:
    found = [chosen(kind="clip", share=0.25, step=step) for step in range(8)]
    first_of = [torch.randperm(2, generator=torch.Generator().manual_seed(row_key("covariance", n))) for n in range(8)]
    assert found == [FIRST if int(order[0]) == 0 else LAST for order in first_of]
    assert FIRST in found and LAST in found


def test_clip_takes_the_policy_term_of_its_tokens_but_not_their_kl() -> None:
    algorithm = GRPOAlgorithm(
        beta=1.0, kl_estimator="k2", surrogate="unclipped", terms={"c": Covariance(kind="clip", share=0.5)}
    )
    given = {"old_logprobs": [-1.0, -2.0], "ref_logprobs": [-3.0, -2.0]}
    found = learned(algorithm, [-1.0, -2.0], advantage=2.0, covariance_mask=[True, False], **given)
    assert found.loss == pytest.approx(0.5 * 2.0**2 - 2.0)
    assert found.slopes == pytest.approx([2.0, -2.0])
    assert found.sums["covariance/chosen"] == (1.0, 2.0)


def test_kl_holds_its_tokens_back_whichever_way_they_have_moved() -> None:
    ahead, behind, still = 0.5, -0.25, 1e-5  # within rounding nothing has moved
    found = learned(
        objective(kind="kl", kl_coef=0.3),
        [-1.0 + ahead, -1.0 + behind, -1.0 + still, -1.0 + ahead],
        old_logprobs=[-1.0] * 4,
        covariance_mask=[True, True, True, False],
    )
    assert found.loss == pytest.approx(0.3 * (0.5 + 0.25))
    assert found.slopes == pytest.approx([0.3, -0.3, 0.0, 0.0])
    assert found.sums["covariance/chosen"] == (3.0, 4.0)


def test_the_penalty_is_weighed_as_the_policy_term_is() -> None:
    algorithm = GRPOAlgorithm(
        beta=0.0, mismatch="truncate_token", mismatch_max=1.5, terms={"c": Covariance(kind="kl", kl_coef=2.0)}
    )
    drawn = {"sampling_logprobs": [-2.0], "covariance_mask": [True]}  # π_old/π_sampling = e, cut to 1.5
    found = learned(algorithm, [-0.9], old_logprobs=[-1.0], weight=0.5, **drawn)
    assert found.loss == pytest.approx(0.5 * 1.5 * 2.0 * 0.1)


def test_it_needs_the_policy_at_collection_and_the_penalty_every_completion() -> None:
    clip, held = objective(kind="clip"), objective(kind="kl")
    assert clip.needs == held.needs == Needs(old_logprobs=True)
    assert clip.skips_zeros and not held.skips_zeros
    for algorithm in (clip, held):
        with pytest.raises(ValueError, match="covariance_mask"):  # that nobody has prepared
            learned(algorithm, [-1.0])


def test_the_presets_are_of_either_kind() -> None:
    kinds = {
        name: next(iter(GRPOAlgorithm(**preset_fields(name)).active_terms.values())) for name in ("clip_cov", "kl_cov")
    }
    assert kinds == {"clip_cov": Covariance(kind="clip"), "kl_cov": Covariance(kind="kl", share=2e-3)}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "cov"}, "kind.*cov"),
        ({"kind": "none"}, "kind.*none"),
        ({"share": 0.0}, r"share.*0\.0"),
        ({"share": 1.5}, r"share.*1\.5"),
        ({"low": -math.inf}, "low.*-inf"),
        ({"low": math.nan}, "low.*nan"),
        ({"high": 0.5}, r"high.*0\.5"),
        ({"kl_coef": -1.0}, r"kl_coef.*-1\.0"),
        ({"kl_coef": math.inf}, "kl_coef.*inf"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Covariance(**{"kind": "kl", **fields})


@pytest.mark.parametrize("kind", ["clip", "kl"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_teacher_s_advantages_are_refused_beside_it_and_its_divergence_is_not(kind: Any, order: int) -> None:
    def terms(teacher: Distillation) -> dict[str, Any]:
        return dict([("covariance", Covariance(kind=kind)), ("teacher", teacher)][::order])

    for teacher in (Distillation(), Distillation(advantage="reweigh")):
        with pytest.raises(ValueError, match="Covariance"):
            GRPOAlgorithm(beta=0.0, terms=terms(teacher))
    GRPOAlgorithm(beta=0.0, terms=terms(Distillation(divergence="forward_kl")))
