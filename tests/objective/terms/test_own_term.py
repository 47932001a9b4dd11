"""A term of a file outside the package in real runs: configured, computed for, logged, saved, resumed and named."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grpo_pl.objective import terms
from grpo_pl.objective.terms import Term
from tests.training.runs import assert_same_end, resumed


def _objective(class_path: str = "user_terms.PulledBack", **arguments: Any) -> dict[str, Any]:
    own = {"class_path": class_path, "init_args": arguments}
    return {"group_size": 4, "beta": 0.0, "terms": {"mine": own}}


def test_a_run_has_what_it_needs_its_metrics_and_its_state_and_a_resumed_one_goes_on(
    command_line: Any, read_metrics: Any
) -> None:
    config = command_line.config("own", model__algorithm=_objective(strength=0.5))
    command_line.done("fit", "--config", config, "--model.algorithm.terms.mine.init_args.strength=0.8")
    run, (_, whole) = command_line.runs / "own", resumed(command_line, read_metrics, command_line.runs / "own")
    column = {key: [float(row[key]) for row in whole] for key in whole[0] if key.startswith("pulled/")}
    assert column["pulled/strength"] == [0.4, 0.2, 0.1, 0.05]
    assert all(0 < share < 1 for share in column["pulled/unsure"])  # of entropies at collection
    assert column["pulled/distance"][0] == 0 < column["pulled/distance"][-1]  # to a reference that stays
    (state,) = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["terms"].values()
    assert state == {"strength": 0.05, "unsure": pytest.approx(column["pulled/unsure"][-1])}
    assert_same_end(run, command_line.runs / "reown")


@pytest.mark.parametrize("hook", ["check", "check_run", "prepare", "extra"])
def test_one_that_fails_ends_the_run_in_one_line_that_names_it(command_line: Any, hook: str) -> None:
    config = command_line.config(f"fails_{hook}", model__algorithm=_objective("user_terms.Failing", hook=hook))
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 1
    (line,) = [line for line in outcome.err.splitlines() if f"of {hook}" in line]
    assert "model.algorithm.terms.mine" in line and "Traceback" not in outcome.err


@pytest.mark.parametrize("key", ["reward_std", "grad_norm"])
def test_a_metric_of_a_name_that_the_step_logs_ends_the_run_in_one_line(command_line: Any, key: str) -> None:
    config = command_line.config(f"logs_{key}", model__algorithm=_objective("user_terms.Logging", key=key))
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 1 and "Traceback" not in outcome.err
    assert [line for line in outcome.err.splitlines() if key in line and "model.algorithm.terms" in line]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"class_path": "user_terms.PulledBack", "init_args": {"strenght": 0.1}}, "strength"),
        ({"class_path": "user_terms.Nothing"}, "user_terms"),
        ({"class_path": "user_parts.PulledBack", "init_args": {"strength": 0.1}}, "PulledBack"),  # which is no term
    ],
)
def test_one_that_is_not_there_is_told_before_anything_is_computed(
    command_line: Any, own: dict[str, Any], told: str
) -> None:
    config = command_line.config("absent", model__algorithm={"beta": 0.0, "terms": {"mine": own}})
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 2 and told in outcome.err and "Traceback" not in outcome.err


def _shipped() -> Iterator[type[Term]]:
    for module in pkgutil.iter_modules(terms.__path__, f"{terms.__name__}."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Term) and kind.__module__ == module.name and not _is_base(kind):
                yield kind


def _is_base(kind: type[Term]) -> bool:
    return kind.__module__.endswith((".base", ".parts"))


def test_the_page_of_terms_lists_every_shipped_one_with_its_fields(command_line: Any) -> None:
    page, shipped = command_line("fit", "--help", "terms").out, list(_shipped())
    assert len(shipped) == 12
    for kind in shipped:
        entry = page.partition(f"{kind.__module__}.{kind.__name__}: ")[2].partition("\ngrpo_pl.")[0]
        assert entry, kind
        assert all(f"{field.name} " in entry for field in dataclasses.fields(kind)), kind  # type: ignore[arg-type]
