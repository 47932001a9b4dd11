"""The doctor in ``fit``: it says each finding once, also over a resume, and changes nothing."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.extras.doctor.callback import Doctor
from grpo_pl.extras.doctor.rollouts import repeated_texts
from grpo_pl.rewards.base import Score
from tests.extras.doctor.test_rules import ROLLOUT

SLOW: dict[str, Any] = {"model__optimization": {"lr": 1e-8}}


def test_a_finding_is_said_once_also_over_a_resume(command_line: Any) -> None:
    config = command_line.config("slow", **SLOW, data__prompts_per_step=8)
    first = command_line.done("fit", "--config", config)
    assert first.err.count("D40 rate too small") == 1
    assert first.err.count("D25 few held-out problems") == 1
    assert first.err.count("After 2 of 4 rollouts: 6 held-out problems were answered in both") == 1
    resumed = command_line.done("fit", "--config", config, "--resume", "--data.steps=5")
    assert not any(said in resumed.err for said in ("D40", "D25", "After"))


def test_a_run_is_the_same_with_and_without_it(
    command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = command_line.config("seen", data__steps=2)
    command_line.done("fit", "--config", config, "--name=seen")
    monkeypatch.setattr(Doctor, "on_train_batch_start", lambda *_: None)
    command_line.done("fit", "--config", config, "--name=unseen")
    seen, unseen = (command_line.runs / name for name in ("seen", "unseen"))
    assert read_metrics(seen / "metrics.csv") == read_metrics(unseen / "metrics.csv")
    assert (seen / "completions.jsonl").read_text() == (unseen / "completions.jsonl").read_text()


def test_what_was_measured_survives_a_checkpoint() -> None:
    doctor, again, file = Doctor(), Doctor(), BytesIO()
    doctor.measured = [ROLLOUT]
    torch.save(doctor.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.measured == doctor.measured


def test_equal_texts_are_compared_inside_their_group_only() -> None:
    texts = ["a", "a", "b", "a", "b", "b"]
    scores = [Score(value, "wrong") for value in (0.0, 0.5, 0.0, 1.0, 0.0, 0.0)]
    assert repeated_texts(texts, scores, 3) == (2, 1)
    late = [Score(0.0, "timeout") if i == 1 else score for i, score in enumerate(scores)]
    assert repeated_texts(texts, late, 3) == (1, 0)  # a clock is no noise
