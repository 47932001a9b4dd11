"""One line for a mistake, with the nearest right spelling."""

from pathlib import Path
from typing import Any

import pytest

OPTIONS = ["model.algorithm.beta", "model.algorithm.group_size", "data.steps", "trainer.max_epochs", "name"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.algorithm.betta", "; did you mean --model.algorithm.beta?"),
        ("algorithm.group_size", "; did you mean --model.algorithm.group_size?"),  # the right leaf, too short a path
        ("steps", "; did you mean --data.steps?"),
        ("zzzzzz", ""),
    ],
)
def test_the_nearest_option_is_named_and_none_where_none_is_near(name: str, expected: str) -> None:
    from grpo_pl.usage import nearest

    assert nearest(name, OPTIONS, prefix="--") == expected


def test_the_nearest_class_is_looked_for_in_the_module_that_was_named() -> None:
    from grpo_pl.usage import nearest_class

    assert nearest_class("grpo_pl.rewards.MatReward") == "; did you mean MathReward?"
    assert nearest_class("no_such_package.Thing") == ": No module named 'no_such_package'"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.algorithm.betta=0"], "unknown option --model.algorithm.betta; did you mean --model.algorithm.beta?"),
        (["--trainer.max_epoch", "3"], "unknown option --trainer.max_epoch; did you mean --trainer.max_epochs?"),
        (["--model.algorithm.beta", "x"], "model.algorithm.beta must be of type float, got 'x'"),
        (["--model.rewards+=MathRewar"], "model.rewards: there is no MathRewar; did you mean MathReward?"),
        (
            ["--data.source=grpo_pl.data.arithmetic.ArithmeticPrompt"],
            "there is no grpo_pl.data.arithmetic.ArithmeticPrompt; did you mean ArithmeticPrompts?",
        ),
        (
            ["--data.source.digit", "3"],
            "data.source: grpo_pl.data.arithmetic.ArithmeticPrompts has no argument 'digit'; did you mean digits?",
        ),
        (["--config", "{folder}/none.yaml"], "no such file: {folder}/none.yaml"),
    ],
)
def test_a_mistake_in_an_option_is_one_line_and_status_2(
    command_line: Any, arguments: list[str], expected: str
) -> None:
    folder = str(command_line.folder)
    before = set(command_line.folder.rglob("*"))
    config = command_line.config("usage")
    outcome = command_line("fit", "--config", config, *(a.replace("{folder}", folder) for a in arguments))
    assert outcome.status == 2
    assert outcome.err.splitlines()[0] == f"grpo-pl fit: error: {expected.replace('{folder}', folder)}"
    assert not outcome.out
    assert set(command_line.folder.rglob("*")) - before <= {config}  # no run folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {stps: 3}", "unknown key 'data.stps'; did you mean data.steps?"),
        ("modle: {engine: null}", "unknown key 'modle.engine'; did you mean model.engine?"),
        (
            "model: {rewards: [{class_path: grpo_pl.rewards.MathReward, init_args: {worker: 3}}]}",
            "model.rewards: grpo_pl.rewards.MathReward has no argument 'worker'; did you mean workers?",
        ),
        (
            "model: {rewards: [{class_path: grpo_pl.rewards.MatReward}]}",
            "there is no grpo_pl.rewards.MatReward; did you mean MathReward?",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_and_status_2(
    command_line: Any, tmp_path: Path, text: str, expected: str
) -> None:
    typo = tmp_path / "typo.yaml"
    typo.write_text(text)
    outcome = command_line("fit", "--config", command_line.config("usage"), "--config", typo)
    assert (outcome.status, outcome.err.splitlines()[0]) == (2, f"grpo-pl fit: error: {expected}")


def test_an_unknown_command_names_the_nearest(command_line: Any) -> None:
    outcome = command_line("validat")
    assert (outcome.status, outcome.err.splitlines()[0]) == (
        2,
        "grpo-pl: error: unknown command 'validat'; did you mean validate?",
    )
