"""The files that drive a step name no source of rollouts and no term of the objective, and read as the pipeline."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import grpo_pl
from grpo_pl.config.terms import EARLIER
from grpo_pl.rewards.trust import TERMS

PACKAGE = Path(grpo_pl.__file__).parent
SOURCES = {"PrefetchedRollouts", "PartialRollouts", "prefetch", "partial_rollouts"}
OF_SOURCES = {"partial_rollouts.py", "source_choice.py"}
OF_TERMS = {"demonstrated.py", "self_teacher.py", "frozen_models.py"}
SPINE = [
    PACKAGE / "objective" / "algorithm.py",
    *(file for file in sorted((PACKAGE / "training").glob("*.py")) if file.name not in OF_SOURCES | OF_TERMS),
]
WORDS = {"share", "rate", "weights", "clip", "kind", "coef", "low", "high", "target", "top_k", "mix", "process"}
"""Fields and modules of terms that the spine uses in other senses, such as weights of tokens."""
ARGUMENTS = {"partial_rollouts", "PartialRollouts"}
"""Arguments of `GRPOModule` by which a configuration chooses a source, and which it hands on."""


def _kinds() -> Iterator[type]:
    for module, names in TERMS.items():
        for name in names:
            yield getattr(import_module(f"grpo_pl.objective.terms.{module}"), name)


def _names(file: Path) -> set[str]:
    """Every name that a file uses: variables, attributes, arguments, modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Import() | ast.ImportFrom():
                module = getattr(node, "module", None) or ""
                found |= {part for alias in node.names for part in (*module.split("."), *alias.name.split("."))}
    return found


def _forbidden() -> set[str]:
    of_terms = {each.name for kind in _kinds() for each in fields(kind)} | {kind.__name__ for kind in _kinds()}  # type: ignore[arg-type]
    return (of_terms | set(TERMS) | EARLIER | SOURCES) - WORDS


@pytest.mark.parametrize("file", SPINE, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_file_of_the_spine_names_no_source_and_no_term(file: Path) -> None:
    allowed = ARGUMENTS if file.name == "module.py" else set()
    assert _names(file) & _forbidden() - allowed == set()


def test_the_search_finds_what_it_looks_for() -> None:
    own = PACKAGE / "training" / "source_choice.py"
    assert _names(own) & _forbidden() >= {"PartialRollouts", "partial_rollouts"}
    assert _names(PACKAGE / "objective" / "terms" / "chord.py") & _forbidden() >= {"CHORD", "coef_final"}


def test_a_step_reads_as_the_pipeline() -> None:
    tree = ast.parse((PACKAGE / "training" / "module.py").read_text())
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "training_step")
    lines = ast.unparse(step.body[1:]).splitlines()  # without its docstring
    assert len(lines) <= 15
    calls = [f"self.{name}(" for name in ("collect", "update", "engine.update_weights", "_log_step", "source.commit")]
    places = ["\n".join(lines).find(call) for call in calls]
    assert min(places) >= 0 and places == sorted(places)


def test_the_loss_takes_the_tokens_and_their_weights() -> None:
    from grpo_pl.objective.algorithm import GRPOAlgorithm

    assert GRPOAlgorithm.loss.__code__.co_varnames[: GRPOAlgorithm.loss.__code__.co_argcount] == (
        "self",
        "tokens",
        "weights",
    )
    assert [name for name in dir(GRPOAlgorithm) if name.startswith("needs_")] == []
