"""Self-distillation: what it asks of the teacher that it is itself; its formula is distillation's."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from grpo_pl.config.presets import preset_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs, Teaching
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from tests.objective.terms.one_completion import learned


@pytest.mark.parametrize(
    ("weights", "of_start"),
    [("start", True), ("live", False), ("average", False)],
)
def test_it_needs_itself_as_it_was_as_it_is_or_an_average(weights: Any, of_start: bool) -> None:
    term = SelfDistillation(weights=weights, rate=0.2, divergence="jensen_shannon", mix=0.3, top_k=20)
    algorithm = GRPOAlgorithm(beta=0.0, terms={"self": term})
    teaching = Teaching(weights=weights, rate=0.2, whole=True, mix=0.3, top_k=20)
    assert algorithm.needs == Needs(teacher=teaching)
    assert teaching.of_itself and algorithm.needs.start_weights == of_start
    assert not algorithm.needs.ref_logprobs  # the copy as it started scores no KL


@pytest.mark.parametrize("fields", [{"coef": 0.5}, {"advantage": "reweigh", "coef": 0.5}, {"divergence": "forward_kl"}])
def test_its_loss_is_that_of_distillation(fields: dict[str, Any]) -> None:
    given = {"advantage": 2.0, "teacher_logprobs": [-3.0, -1.0], "divergence": [0.7, 0.1], "taught": [True]}
    ours, other = (
        learned(GRPOAlgorithm(beta=0.0, terms={"t": term}), [-1.0, -2.0], **given)
        for term in (SelfDistillation(weights="live", **fields), Distillation(**fields))
    )
    assert ours == other
    skips = [
        GRPOAlgorithm(beta=0.0, terms={"t": term}).skips_zeros
        for term in (SelfDistillation(weights="live", **fields), Distillation(**fields))
    ]
    assert skips == [fields.get("advantage") == "reweigh"] * 2


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("opsd", {"divergence": "jensen_shannon", "weights": "start", "alone": True}),
        ("sdft", {"divergence": "reverse_kl", "weights": "live", "alone": True}),
        ("rlsd", {"coef": 0.5, "weights": "live", "advantage": "reweigh"}),
    ],
)
def test_presets_choose_the_teacher_s_weights(preset: str, fields: dict[str, Any]) -> None:
    (term,) = GRPOAlgorithm(**preset_fields(preset)).active_terms.values()
    assert term == SelfDistillation(**fields)


def test_an_average_moves_by_its_rate() -> None:
    (term,) = GRPOAlgorithm(**preset_fields("sdpo")).active_terms.values()
    assert isinstance(term, SelfDistillation) and term.weights == "average" and 0 < term.rate < 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"weights": "frozen"}, "weights.*frozen"),
        ({"weights": "model"}, "weights.*model"),  # which is Distillation
        *(({"rate": rate}, f"rate.*{rate}") for rate in (0.0, 1.5, -0.1, math.nan)),
        ({"coef": -0.5}, r"coef.*-0\.5"),  # as those of Distillation
        ({"top_k": 1, "divergence": "forward_kl"}, "top_k.*1"),
        ({"mix": 1.0}, r"mix.*1\.0"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SelfDistillation(**{"weights": "live", **fields})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ratio_level": "geometric"}, "geometric.*SelfDistillation"),
        ({"surrogate": "nll", "samples": "correct", "baseline": "none", "scale": "none"}, "surrogate nll"),
        ({"alone": True}, "baseline none"),
    ],
)
def test_an_objective_that_it_contradicts_is_refused(fields: dict[str, Any], told: str) -> None:
    term = SelfDistillation(weights="live", alone=fields.pop("alone", False))
    with pytest.raises(ValueError, match=told):
        GRPOAlgorithm(**fields, beta=0.0, terms={"self": term})


def test_a_teacher_of_its_own_is_never_the_model_s() -> None:
    assert {**asdict(Distillation()), "weights": "live", "rate": 0.05} == asdict(SelfDistillation(weights="live"))
