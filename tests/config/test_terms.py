"""Terms of the objective in configurations: merged by name, removed by null, and fields of 0.3."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.config.objects import Config, ConfigError
from grpo_pl.config.terms import _tell, with_terms_of_fields
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


GIGPO_OF_0_3 = {"supervision": "turn", "turn_advantage": "gigpo", "scale": "none"}


def whole(*trees: dict[str, Any], options: tuple[str, ...] = ()) -> GRPOAlgorithm:
    return Config((), trees, options).build("model.algorithm", GRPOAlgorithm)


@pytest.mark.parametrize(
    ("tree", "beta", "gamma"),
    [
        ({"model.algorithm.preset": "gigpo", "model.algorithm.gamma": 0.5}, 0.01, 0.5),
        ({"model": {"algorithm.preset": "gigpo", "algorithm.gamma": 0.5}}, 0.01, 0.5),
        ({"model.algorithm.beta": 0.5, "model": {"algorithm": {"preset": "gigpo"}}}, 0.5, 0.95),
        ({"model.algorithm.preset": "gigpo", "model.algorithm.beta": 0.5}, 0.5, 0.95),
    ],
)
def test_what_stands_beside_a_field_of_0_3_keeps_its_value(tree: dict[str, Any], beta: float, gamma: float) -> None:
    found = whole(tree)
    assert (found.beta, found.scale, found.terms["gigpo"].gamma) == (beta, "none", gamma)


def test_a_field_that_nothing_takes_changes_nothing_beside_it() -> None:
    assert whole({"model.algorithm.beta": 0.5, "model.algorithm.gamma": 0.9}) == GRPOAlgorithm(beta=0.5)


@pytest.mark.parametrize(
    ("objectives", "options", "name", "argument", "value"),
    [
        (({"gamma": 0.9}, GIGPO_OF_0_3), (), "gigpo", "gamma", 0.9),
        (({"covariance_share": 0.01}, {"covariance": "kl"}), (), "covariance", "share", 0.01),
        (
            ({"entropy_coef_step": 0.05},),
            ("--model.algorithm.entropy_target=0.3",),
            "entropy_target",
            "coef_step",
            0.05,
        ),
        (
            ({"preset": "distill"}, {"teacher_rate": 0.3}, {"teacher_weights": "average"}),
            (),
            "self_distillation",
            "rate",
            0.3,
        ),
        (
            (),
            ("--model.algorithm.entropy_coef_step=0.1", "--model.algorithm.entropy_target=0.3"),
            "entropy_target",
            "coef_step",
            0.1,
        ),
    ],
)
def test_a_field_of_0_3_waits_for_the_one_that_makes_its_term(
    objectives: tuple[dict[str, Any], ...], options: tuple[str, ...], name: str, argument: str, value: float
) -> None:
    assert getattr(built(*objectives, options=options)[name], argument) == value


@pytest.mark.parametrize(
    "options",
    [
        ("entropy_target=0.3", "preset=dapo", "entropy_coef_step=0.1"),
        ("entropy_target=0.3", "terms.entropy_target=null", "entropy_coef_step=0.1"),
        ("supervision=turn", "preset=dr_grpo", "gamma=0.5"),
    ],
)
def test_what_was_reset_or_removed_does_not_come_back(options: tuple[str, ...]) -> None:
    assert built(options=tuple(f"--model.algorithm.{option}" for option in options)) == {}


def test_a_field_of_0_3_finds_its_term_under_another_name() -> None:
    term = {"class_path": "grpo_pl.objective.terms.gigpo.GiGPO"}
    found = built({"scale": "none", "terms": {"mine": term}}, options=("--model.algorithm.gamma=0.5",))
    assert found.keys() == {"mine"} and found["mine"].gamma == 0.5


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"supervision": "procces"}, "supervision is 'procces'"),
        ({"supervision": None}, "supervision is None"),
        ({"turn_advantage": "gigp"}, "turn_advantage is 'gigp'"),
        ({"teacher_weights": "strt"}, "teacher_weights is 'strt'"),
        ({"supervision": "token", "distillation": "forward_kl"}, "twice"),
        ({"preset": "gkd", "supervision": "token"}, "twice"),
    ],
)
def test_what_0_3_refused_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=told):
        built(fields)


@dataclass(frozen=True, kw_only=True)
class Discounting(GRPOAlgorithm):
    """An objective of somebody's own, with a field that 0.3 had."""

    gamma: float = 0.5


OWN = {"class_path": f"{__name__}.Discounting"}


@pytest.mark.parametrize(
    ("objectives", "options"),
    [
        (({**OWN, "init_args": {"gamma": 0.9}},), ()),
        ((OWN, {"init_args": {"gamma": 0.9}}), ()),
        ((OWN, {"gamma": 0.9}), ()),
        ((OWN,), ("--model.algorithm.gamma=0.9",)),
        ((), (f"--model.algorithm={OWN['class_path']}", "--model.algorithm.gamma=0.9")),
    ],
)
def test_a_field_of_a_class_of_one_s_own_is_no_field_of_0_3(
    objectives: tuple[dict[str, Any], ...], options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Discounting=Discounting))
    trees = tuple({"model": {"algorithm": fields}} for fields in (*objectives, {"anchor_coef": 0.1}))
    algorithm: Any = Config((), trees, options).build("model.algorithm", GRPOAlgorithm)
    assert (type(algorithm), algorithm.gamma) == (Discounting, 0.9)
    assert algorithm.active_terms == {"anchor": Anchor(coef=0.1)}


@pytest.mark.parametrize(
    ("launcher", "lines"),
    [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0), ({"LOCAL_RANK": "1"}, 0), ({"SLURM_PROCID": "3"}, 0)],
)
def test_a_field_of_0_3_is_told_by_the_first_process_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str], lines: int
) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    _tell.cache_clear()
    with_terms_of_fields({"anchor_coef": 0.25}, "model.algorithm")
    assert capsys.readouterr().err.count("\n") == lines


def test_a_field_that_no_term_takes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with_terms_of_fields({"gamma": 0.75, "step_weight": 1.0}, "model.algorithm")
    told = capsys.readouterr().err
    assert "model.algorithm.gamma is 0.75" in told and "step_weight" not in told
