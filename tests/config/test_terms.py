"""Terms of the objective in configurations: merged by name, removed by null, and fields of 0.3."""

from typing import Any

import pytest

from grpo_pl.config.objects import Config, ConfigError
from grpo_pl.config.terms import with_terms_of_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.anchor import Anchor
from grpo_pl.rewards.trust import Untrusted, refuse_own_classes

ANCHOR = "grpo_pl.objective.terms.anchor.Anchor"


def built(*objectives: dict[str, Any], options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The terms of overlays, one after the other."""
    trees = tuple({"model": {"algorithm": fields}} for fields in objectives)
    return dict(Config((), trees, options).build("model.algorithm", GRPOAlgorithm).active_terms)


def anchor(name: str = "anchor", **arguments: Any) -> dict[str, Any]:
    return {"terms": {name: {"class_path": ANCHOR, "init_args": arguments}}}


@pytest.mark.parametrize(
    ("objectives", "options", "terms"),
    [
        ((anchor(coef=0.1), {"beta": 0.1}), (), {"anchor": Anchor(coef=0.1)}),
        ((anchor(coef=0.1), {"terms": {"anchor": {"init_args": {"coef": 0.5}}}}), (), {"anchor": Anchor(coef=0.5)}),
        ((anchor(coef=0.1), {"terms": {"anchor": None}}), (), {}),
        ((anchor(coef=0.1), {"preset": "dapo"}), (), {}),
        (({"preset": "dapo"}, anchor(coef=0.1)), (), {"anchor": Anchor(coef=0.1)}),
        (({"preset": "dapo"} | anchor("mine", coef=0.1),), (), {"mine": Anchor(coef=0.1)}),
        ((anchor(coef=0.1),), ("--model.algorithm.terms.anchor.init_args.coef=0.7",), {"anchor": Anchor(coef=0.7)}),
        ((anchor(coef=0.1),), ("--model.algorithm.terms.anchor=null",), {}),
        ((anchor(coef=0.1), {"terms": {}}), (), {}),
    ],
)
def test_overlays_and_options_merge_terms_by_name(
    objectives: tuple[dict[str, Any], ...], options: tuple[str, ...], terms: dict[str, Any]
) -> None:
    assert built(*objectives, options=options) == terms


@pytest.mark.parametrize(
    ("objectives", "error", "line"),
    [
        ((anchor(coef=0.1) | {"beta": 0.1}, anchor("other", coef=0.1)), ValueError, "two are of the class Anchor"),
        ((anchor(koef=0.1),), ConfigError, "no argument 'koef'; did you mean coef"),
        ((anchor(coef=0.1), {"terms": {"anchor": {"coef": 0.5}}}), ConfigError, "coef"),
        (({"terms": None},), ValueError, "^terms must be a mapping"),
        (({"terms": {"anchor": {}}},), ValueError, "no class_path that says which term"),
        ((anchor(coef=-1.0),), ValueError, r"^Anchor needs a coef above 0 and finite, got -1\.0"),
    ],
)
def test_terms_that_make_no_sense_are_refused(
    objectives: tuple[dict[str, Any], ...], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line):
        built(*objectives)


@pytest.mark.parametrize(
    ("objectives", "options", "terms"),
    [
        (({"anchor_coef": 0.1},), (), {"anchor": Anchor(coef=0.1)}),
        (({"anchor_coef": 0.0},), (), {}),
        (({"anchor_coef": 0.1}, {"anchor_coef": 0.3}), (), {"anchor": Anchor(coef=0.3)}),
        (({"anchor_coef": 0.1}, {"anchor_coef": 0.0}), (), {}),
        (({"beta": 0.1},), ("--model.algorithm.anchor_coef=0.25",), {"anchor": Anchor(coef=0.25)}),
    ],
)
def test_fields_of_0_3_are_terms_and_their_place_is_told(
    objectives: tuple[dict[str, Any], ...], options: tuple[str, ...], terms: dict[str, Any]
) -> None:
    assert built(*objectives, options=options) == terms


@pytest.mark.parametrize(
    "tree",
    [
        {"model.algorithm.anchor_coef": 0.2},
        {"model": {"algorithm.anchor_coef": 0.2}},
        {"model.algorithm.terms": anchor(coef=0.2)["terms"], "model": {"algorithm": {"beta": 0.1}}},
        {"model": {"algorithm": {"beta": 0.1}, "algorithm.terms.anchor": anchor(coef=0.2)["terms"]["anchor"]}},
    ],
)
def test_keys_may_be_written_out_in_one(tree: dict[str, Any]) -> None:
    first = {"model": {"algorithm": anchor("other", coef=0.1) | {"terms": {"other": None}}}}
    built = Config((), (first, tree), ()).build("model.algorithm", GRPOAlgorithm)
    assert built.active_terms == {"anchor": Anchor(coef=0.2)}


def test_the_line_that_tells_names_the_old_field_and_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    found = with_terms_of_fields({"anchor_coef": 0.125, "beta": 0.0}, "model.algorithm")
    assert found == {"beta": 0.0} | anchor(coef=0.125)
    told = capsys.readouterr().err
    assert "model.algorithm.anchor_coef" in told and "model.algorithm.terms.anchor" in told and ANCHOR in told


def test_of_a_stranger_s_settings_the_shipped_terms_alone_are_built() -> None:
    refuse_own_classes({"algorithm": {"beta": 0.0, **anchor(coef=0.1)}})
    for term in ("Anchor", {"class_path": "evil.Term"}, {"class_path": ANCHOR, "init_args": {"coef.class_path": "x"}}):
        with pytest.raises(Untrusted):
            refuse_own_classes({"algorithm": {"terms": {"mine": term}}})
