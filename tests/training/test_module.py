"""What flows through a real run: what rewards are told, what is logged, and when the engine hears of new weights."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.decode_kernel import built_kernels
from grpo_pl.rollout.native.decoder_choice import SWITCH

ReadMetrics = Callable[[Path], list[dict[str, str]]]
SHORT: dict[str, Any] = {"model__cold_start": None, "model__sampling": {"max_completion_length": 8}}


def _run(command_line: Any, name: str, **changes: Any) -> Path:
    command_line.done("fit", "--config", command_line.config(name, **changes))
    folder: Path = command_line.runs / name
    return folder / "metrics.csv"


def _training(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if "reward" in row]


def _held_out(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if "val/pass@1" in row]


TRIED = 2
"""Demonstrations that the trial of the rewards takes before the cold start; what a reward hears then, it forgets."""


@pytest.fixture(scope="module")
def heard(command_line: Any) -> Any:
    """What a reward was told in a run whose demonstrations can be recognised."""
    if "user_parts" in sys.modules:  # other tests of this process may have run it
        sys.modules["user_parts"].HEARD.clear()
        sys.modules["user_parts"].SHOWN.clear()
    _run(
        command_line,
        "listening",
        model__cold_start={"steps": 2, "batch_size": 4},
        model__rewards=[{"class_path": "user_parts.Listening", "init_args": {"correctness": True}}],
        data__source={"class_path": "user_parts.Whispering", "init_args": {"digits": 1}},
    )
    return sys.modules["user_parts"]


def _scored(heard: Any) -> list[tuple[list[str], list[str], dict[str, list[Any]]]]:
    """The calls that judge against gold answers, all numbers here; others compare completions with each other."""
    return [call for call in heard.HEARD if all(answer.isdigit() for answer in call[1])]


def test_rewards_never_see_a_demonstration(heard: Any) -> None:
    assert len(heard.SHOWN) == TRIED + 8
    assert all(heard.SECRET in text for text in heard.SHOWN)
    assert len(_scored(heard)) >= 3 * 2 + 4  # three validations of sampled and greedy answers, and four rollouts
    assert heard.SECRET not in repr(heard.HEARD)
    for completions, answers, columns in heard.HEARD:
        assert {"prompt", "question", "completion_length"} <= set(columns)
        assert not any("demo" in name for name in columns)
        assert {len(column) for column in columns.values()} == {len(completions)} == {len(answers)}
        assert columns["prompt"] == columns["question"]  # nothing is put before or behind the question


def test_answers_belong_to_the_questions(heard: Any) -> None:
    for _, answers, columns in _scored(heard):
        for question, answer in zip(columns["question"], answers, strict=True):
            a, b = question.rstrip("=").split("+")
            assert int(a) + int(b) == int(answer)


def test_training_and_validation_ask_different_questions(heard: Any) -> None:
    held_out = {prompt.question for prompt in ArithmeticPrompts(digits=1).validation(6)}
    asked = [set(columns["question"]) for _, _, columns in _scored(heard)]
    assert sum(questions == held_out for questions in asked) == 6
    assert sum(not questions & held_out for questions in asked) >= 4


def test_the_cold_start_shows_training_questions_only(heard: Any) -> None:
    source = ArithmeticPrompts(digits=1)
    answers = {prompt.answer for step in (-1, -2) for prompt in source.prompts(step, count=4)}
    assert {text.split("{")[1].split("}")[0] for text in heard.SHOWN[TRIED:]} == answers


def test_the_engine_hears_of_new_weights_once_after_each_rollout(command_line: Any) -> None:
    _run(
        command_line,
        "telling",
        **SHORT,
        model__engine={"class_path": "user_parts.Telling"},
        model__validation={"samples": 1, "greedy": False},
    )
    # validations before, in the middle and at the end; one draw each
    assert [
        "draw",
        *["draw", "update"] * 2,
        "draw",
        *["draw", "update"] * 2,
        "draw",
    ] == sys.modules["user_parts"].EVENTS


def test_what_has_no_value_in_a_step_is_left_empty(command_line: Any, read_metrics: ReadMetrics) -> None:
    rewards = [
        {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
        {"class_path": "user_parts.Flickering"},
    ]
    rows = _training(read_metrics(_run(command_line, "flickering", **SHORT, model__rewards=rewards)))
    assert [float(row["frac_reward_zero_std"]) for row in rows] == [0, 1, 0, 1]
    for name in ("loss", "grad_norm", "entropy", "ratio/mean"):
        assert [name in row for row in rows] == [True, False, True, False]
    assert not any("completions/mean_length_correct" in row for row in rows)


def test_kl_is_logged_where_there_is_a_reference_and_begins_at_zero(
    command_line: Any, read_metrics: ReadMetrics
) -> None:
    metrics = _run(command_line, "kl", model__algorithm={"group_size": 4, "beta": 0.1})
    kl = [float(row["kl"]) for row in _training(read_metrics(metrics))]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert all(value > 1e-6 for value in kl[2:])


def test_greedy_validation_can_be_left_out(command_line: Any, read_metrics: ReadMetrics) -> None:
    metrics = _run(command_line, "sampled_only", **SHORT, model__validation={"samples": 2, "greedy": False})
    rows = _held_out(read_metrics(metrics))
    assert len(rows) == 3
    assert all("val/greedy" not in row for row in rows)


def test_validations_of_equal_weights_are_equal(command_line: Any, read_metrics: ReadMetrics) -> None:
    rows = _held_out(
        read_metrics(_run(command_line, "still", model__optimization={"lr": 1e-12}, model__validation={"samples": 8}))
    )
    values = {(row["val/pass@1"], row["val/greedy"]) for row in rows}
    assert len(rows) == 3
    assert len(values) == 1  # held-out samples are drawn with the same noise every time


def test_a_run_drawn_by_an_earlier_rule_goes_on_with_one_line_that_says_so(command_line: Any, tmp_path: Path) -> None:
    """Checkpoints of version 0.2 do not say how tokens were drawn; those of this version resume without the line."""
    checkpoints = _run(command_line, "former", data__steps=1, **SHORT).parent / "checkpoints"
    checkpoint = torch.load(checkpoints / "last.ckpt", weights_only=True)
    assert checkpoint.pop("draw_rule") == "keyed race"
    torch.save(checkpoint, tmp_path / "former.ckpt")
    for name, path, lines in (("same", checkpoints / "last.ckpt", 0), ("other", tmp_path / "former.ckpt", 1)):
        config = command_line.config(name, data__steps=2, **SHORT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = command_line("fit", "--config", config, f"--ckpt_path={path}")
        assert outcome.status == 0, outcome.err
        assert sum("samples differ from here on" in str(warning.message) for warning in caught) == lines


def test_a_resumed_run_draws_with_what_it_drew_with_or_says_so(command_line: Any, monkeypatch: Any) -> None:
    if not built_kernels():
        pytest.skip("no C compiler has built the decode kernel")
    monkeypatch.setenv(SWITCH, fastest := next(iter(built_kernels())))
    run = _run(command_line, "drawn", data__steps=1, **SHORT).parent
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["decoder"] == fastest
    assert json.loads((run / "export" / "grpo_pl.json").read_text())["decoder"] == fastest
    assert json.loads((run / "run.json").read_text())["compute"]["decoder"] == fastest
    assert find_model(run / "checkpoints" / "last.ckpt").decoder == fastest  # which evaluate and export read
    for name, switch, lines in (("kept", "", 0), ("switched", "torch", 1)):
        monkeypatch.setenv(SWITCH, switch)
        config = command_line.config(name, data__steps=2, **SHORT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = command_line("fit", "--config", config, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
        assert outcome.status == 0, outcome.err
        assert sum("and goes on with torch" in str(warning.message) for warning in caught) == lines
        assert ("the decode kernel" in outcome.err) == (not lines)
    monkeypatch.setenv(SWITCH, "torch")
    config = command_line.config("switched", data__steps=2, **SHORT)
    with pytest.warns(UserWarning, match="and goes on with torch"):
        outcome = command_line("validate", "--config", config, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    assert outcome.status == 0, outcome.err
