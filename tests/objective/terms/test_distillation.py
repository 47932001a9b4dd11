"""Distillation: the teacher's part of advantages or of the loss by hand, with rewards and without."""

import math
from typing import Any

import pytest
import torch

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs, Teaching
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.objective.terms.gigpo import GiGPO
from grpo_pl.objective.terms.process import ProcessSupervision
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from grpo_pl.objective.terms.turn_returns import TurnReturns
from tests.objective.terms.one_completion import learned

IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}
UNSCALED = {"baseline": "none", "scale": "none", "beta": 0.0}


def objective(term: Distillation, **fields: Any) -> GRPOAlgorithm:
    return GRPOAlgorithm(**{"beta": 0.0, **fields}, terms={"teacher": term})


def test_the_teacher_adds_its_part_to_the_advantage_of_each_token() -> None:
    """With advantage 2: 2 + ½ (−3 + 1) = 1 and 2 + ½ (−1 + 2) = 2.5; no gradient goes through the gap."""
    found = learned(
        objective(Distillation(coef=0.5), surrogate="unclipped"),
        [-1.0, -2.0],
        advantage=2.0,
        weight=0.5,
        teacher_logprobs=[-3.0, -1.0],
    )
    assert found.loss == pytest.approx(-0.5 * (1.0 + 2.5))
    assert found.slopes == pytest.approx([-0.5, -1.25])
    assert found.sums["teacher/kl"] == (pytest.approx(2.0 - 1.0), 2)


def test_the_gap_is_to_the_policy_as_it_is_however_old_the_one_is_that_drew() -> None:
    found = learned(
        objective(Distillation(), surrogate="unclipped"), [-1.0], old_logprobs=[-1.5], teacher_logprobs=[-0.25]
    )
    assert found.slopes == pytest.approx([-math.exp(0.5) * 0.75])


def test_advantages_may_be_those_of_tokens() -> None:
    found = learned(
        objective(Distillation(), surrogate="unclipped"),
        [-1.0, -1.0],
        advantages=[1.0, -1.0],
        teacher_logprobs=[-2.0, -0.5],
    )
    assert found.slopes == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    ("advantage", "slopes"),
    [
        # the factor ½ + ½ clip(e^{sign · gap}, 0.8, 1.2) of gaps 0.1, 3 and −3
        (2.0, [-2.0 * (0.5 + 0.5 * math.exp(0.1)), -2.0 * 1.1, -2.0 * 0.9]),
        (-2.0, [2.0 * (0.5 + 0.5 * math.exp(-0.1)), 2.0 * 0.9, 2.0 * 1.1]),
        (0.0, [0.0, 0.0, 0.0]),
    ],
)
def test_reweighing_spreads_the_advantage_and_never_turns_it(advantage: float, slopes: list[float]) -> None:
    algorithm = objective(Distillation(advantage="reweigh", coef=0.5, clip=0.2), surrogate="unclipped")
    found = learned(algorithm, [-4.0] * 3, advantage=advantage, teacher_logprobs=[-3.9, -1.0, -7.0])
    assert found.slopes == pytest.approx(slopes)


def test_a_divergence_is_in_the_loss_of_each_token_with_its_own_gradient() -> None:
    divergence = torch.tensor([0.7, 0.1], dtype=torch.float64, requires_grad=True)
    found = learned(
        objective(Distillation(divergence="reverse_kl", coef=0.3), surrogate="unclipped"),
        [-1.0, -2.0],
        advantage=2.0,
        weight=0.5,
        divergence=divergence.tolist(),
    )
    assert found.loss == pytest.approx(0.5 * (-4.0 + 0.3 * 0.8))
    assert found.slopes == pytest.approx([-1.0, -1.0])  # the advantage of rewards alone
    assert found.sums["teacher/divergence"] == (pytest.approx(0.8), 2)
    assert "teacher/kl" not in found.sums


@pytest.mark.parametrize(
    "term", [Distillation(), Distillation(advantage="reweigh"), Distillation(divergence="reverse_kl")]
)
def test_a_completion_without_a_teacher_has_no_part_of_it(term: Distillation) -> None:
    given = {"advantage": 2.0, "teacher_logprobs": [-0.5], "divergence": [7.0]}
    without, within = (learned(objective(term), [-1.0], taught=[taught], **given) for taught in (False, True))
    assert without.loss == pytest.approx(-2.0) and within.loss != pytest.approx(-2.0)
    assert (without.sums["teacher/taught"], within.sums["teacher/taught"]) == ((0, 1), (1, 1))
    assert "teacher/taught" not in learned(objective(term), [-1.0], **given).sums


@pytest.mark.parametrize("term", [Distillation(), Distillation(divergence="forward_kl")])
def test_what_is_masked_does_not_matter(term: Distillation) -> None:
    given = {"advantage": 1.0, "mask": [True, False]}
    found = [
        learned(objective(term), [-1.0, dirt], teacher_logprobs=[-2.0, dirt], divergence=[0.5, dirt], **given)
        for dirt in (-1.0, math.nan)
    ]
    assert found[0] == found[1]


def test_its_loss_stands_behind_the_entropy_bonus() -> None:
    """In float32, 1e8 − 1e8 + 1 is 1 and 1e8 + 1 − 1e8 is 0: the sums of 0.3 are kept to the last digit."""
    algorithm = GRPOAlgorithm(beta=0.0, entropy_coef=1.0, terms={"teacher": Distillation(divergence="forward_kl")})
    one = torch.ones(1, 1)
    output = algorithm.loss(
        {
            "logprobs": -one,
            "mask": one.bool(),
            "advantages": -1e8 * one,
            "entropy": 1e8 * one,
            "divergence": one,
        },
        one,
    )
    assert output.loss.item() == 1.0
    assert list(output.stats)[-2:] == ["entropy", "teacher/divergence"]


def test_alone_every_completion_is_learned_from_whatever_its_reward() -> None:
    nan = math.nan
    algorithm = GRPOAlgorithm(
        **UNSCALED, group_size=4, mask_truncated=True, terms={"distillation": Distillation(alone=True)}
    )
    assert algorithm.active_terms == GRPOAlgorithm(**preset_fields("distill")).active_terms
    result = algorithm.advantages(
        values=torch.tensor([[[1.0, nan, 0.0, nan], [nan] * 4]], dtype=torch.float64),
        reward_weights=torch.ones(1),
        lengths=torch.tensor([[3, 2, 0, 1], [1, 1, 1, 9]]),
        truncated=torch.tensor([[False] * 4, [False, False, False, True]]),
    )
    assert not result.advantages.any()
    assert result.keep.tolist() == [[True] * 4, [True, True, True, False]]
    assert result.active.tolist() == [[True, True, False, True], [True, True, True, False]]
    assert result.valid.tolist() == [[True, False, True, False], [False] * 4]
    assert result.informative.all() and result.rewards[0, 0] == 1


@pytest.mark.parametrize(
    ("term", "teaching", "skips"),
    [
        (Distillation(), Teaching(mix=0.5), False),
        (Distillation(advantage="reweigh"), Teaching(mix=0.5), True),  # times 0 is 0
        (Distillation(divergence="forward_kl", mix=0.3), Teaching(whole=True, mix=0.0), False),
        (Distillation(divergence="reverse_kl"), Teaching(whole=True, mix=1.0), False),
        (Distillation(divergence="jensen_shannon", mix=0.3, top_k=5), Teaching(whole=True, mix=0.3, top_k=5), False),
    ],
)
def test_it_needs_a_teacher_that_scores_tokens_or_compares_distributions(
    term: Distillation, teaching: Teaching, skips: bool
) -> None:
    algorithm = objective(term)
    assert algorithm.needs == Needs(teacher=teaching)
    assert not teaching.of_itself and not algorithm.needs.start_weights
    assert algorithm.skips_zeros == skips
    needed = "divergence" if teaching.whole else "teacher_logprobs"
    assert algorithm.needs.missing(()) == needed and algorithm.needs.missing((needed,)) is None
    with pytest.raises(ValueError, match=needed):
        learned(algorithm, [-1.0])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"divergence": "kl"}, r"divergence.*\bkl\b"),
        ({"advantage": "multiply"}, "advantage.*multiply"),
        *(({"mix": mix}, f"mix.*{mix}") for mix in (0.0, 1.0, math.nan)),
        *(({"coef": coef}, f"coef.*{coef}") for coef in (0.0, -0.5, math.inf, math.nan)),
        *(({"top_k": top_k, "divergence": "forward_kl"}, f"top_k.*{top_k}") for top_k in (1, -1)),
        *(({"clip": clip}, f"clip.*{clip}") for clip in (1.0, -0.1)),
        ({"top_k": 5}, "top_k.*divergence"),
        ({"advantage": "reweigh", "divergence": "forward_kl"}, "reweigh.*forward_kl"),
        ({"advantage": "reweigh", "alone": True}, "reweigh.*alone"),
        ({"advantage": "reweigh", "coef": 1.5}, r"coef.*1\.5"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Distillation(**fields)


ALONE = Distillation(alone=True)
DIVERGENCE_ALONE = Distillation(divergence="reverse_kl", alone=True)


@pytest.mark.parametrize(
    ("term", "fields", "told"),
    [
        (Distillation(), UNSCALED | {"surrogate": "nll", "samples": "correct"}, "surrogate nll"),
        (Distillation(), {"ratio_level": "geometric"}, "ratio_level geometric.*Distillation"),
        (ALONE, {"beta": 0.0}, "baseline none and scale none"),
        (ALONE, UNSCALED | {"baseline": "group_mean"}, "baseline none"),
        (ALONE, UNSCALED | {"overlong_buffer": 0.5}, "overlong_buffer 0"),
        (ALONE, UNSCALED | IN_REWARD, "kl_placement loss or beta 0"),
        (ALONE, UNSCALED | {"max_rewards": True}, "max_rewards false"),
        (ALONE, UNSCALED | {"dynamic_sampling": True}, "dynamic_sampling false"),
        (ALONE, UNSCALED | {"samples": "correct"}, "samples all"),
        (DIVERGENCE_ALONE, {"beta": 0.0}, "baseline none"),
        (DIVERGENCE_ALONE, UNSCALED | {"dynamic_sampling": True}, "dynamic_sampling false"),
    ],
)
def test_an_objective_that_it_contradicts_is_refused(term: Distillation, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GRPOAlgorithm(**fields, terms={"teacher": term})


@pytest.mark.parametrize(
    ("credit", "fields"),
    [
        (ProcessSupervision(), {}),
        (TurnReturns(), {"scale": "none"}),
        (GiGPO(), {}),
    ],
)
def test_terms_that_credit_parts_go_with_a_divergence_beside_them_alone(credit: Any, fields: dict[str, Any]) -> None:
    name = type(credit).__name__
    beside = {"credit": credit, "teacher": Distillation(divergence="jensen_shannon", mix=0.1)}
    assert GRPOAlgorithm(**fields, terms=beside).needs.teacher == Teaching(whole=True, mix=0.1)
    with pytest.raises(ValueError, match=f"Distillation and {name}.*divergence"):
        GRPOAlgorithm(**fields, terms=beside | {"teacher": Distillation()})
    with pytest.raises(ValueError, match=f"alone|{name}"):
        GRPOAlgorithm(**UNSCALED, terms=beside | {"teacher": DIVERGENCE_ALONE})


def test_two_teachers_are_refused() -> None:
    terms = {"one": Distillation(), "other": SelfDistillation(weights="live")}
    for order in (1, -1):
        with pytest.raises(ValueError, match="Distillation and SelfDistillation"):
            GRPOAlgorithm(terms=dict([*terms.items()][::order]))


def test_sensible_combinations_are_accepted() -> None:
    objective(ALONE, **UNSCALED, group_size=1, entropy_coef=0.1, num_iterations=2)
    objective(Distillation(), dynamic_sampling=True, ratio_level="sequence", overlong_buffer=0.2)
    objective(Distillation(divergence="forward_kl"), ratio_level="geometric")
    objective(DIVERGENCE_ALONE, **UNSCALED)
