"""``held_out.jsonl``: what each validation of a run found, its size, and a resumed run; held-out numbers before
the first rollout and after the last, each once, whatever the interval."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.callbacks.held_out import HeldOutLog, answers_row, pass_curve
from grpo_pl.evaluation.held_out import grade
from grpo_pl.extras.images.picture import Picture
from grpo_pl.files.rows import read_rows
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import ExactReward
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch
from tests.callbacks.conftest import WholeRun


def test_every_validation_has_its_estimates_and_problems(whole: WholeRun, read_metrics: Any) -> None:
    rows = list(read_rows(whole.folder / "held_out.jsonl"))
    assert [row["step"] for row in rows] == [0, 2, 4]
    logged = [row for row in read_metrics(whole.folder / "metrics.csv") if "val/pass@1" in row]
    for row, metrics in zip(rows, logged, strict=True):
        for name, found in row["metrics"].items():
            assert found["value"] == pytest.approx(float(metrics[name]), abs=1e-6)
            assert found["low"] <= found["value"] <= found["high"]
        right, judged = map(sum, zip(*row["problems"]["val"].values(), strict=True))
        assert right / judged == pytest.approx(float(metrics["val/pass@1"]), abs=1e-6)
        assert row["pass_at"]["val"][0][:2] == [1, pytest.approx(float(metrics["val/pass@1"]), abs=1e-6)]
        assert row["pass_at"]["val"][-1][0] == row["samples"]


def test_completions_are_kept_of_the_first_and_the_last_and_loggers_with_tables_get_them(whole: WholeRun) -> None:
    rows = list(read_rows(whole.folder / "held_out.jsonl"))
    assert [bool(row["answers"]) for row in rows] == [True, False, True]
    assert [[each["question"] for each in row["answers"]] for row in (rows[0], rows[-1])] == [
        [each["question"] for each in rows[0]["answers"]]
    ] * 2
    for row in rows:
        for each in row["answers"]:
            verdicts = [one["correct"] for one in each["completions"]]
            right, judged = row["problems"]["val"][str(each["id"])]
            assert len(verdicts) == min(8, row["samples"])
            assert (verdicts.count(True), len(verdicts) - verdicts.count(None)) == (right, judged)
            assert {"completion", "tokens", "finish_reason", "value", "status"} <= each["greedy"].keys()
    tables = [(step, columns, data) for key, columns, data, step in whole.tables if key == "held_out"]
    assert [step for step, _, _ in tables] == [0, 2, 4]
    _, columns, data = tables[0]
    assert columns[:5] == ["group", "id", "question", "answer", "greedy"]
    first = rows[0]["answers"][0]
    texts = [one["completion"] for one in (*first["completions"], first["greedy"])]
    assert [line[columns.index("completion")] for line in data][: len(texts)] == texts


def test_a_problem_names_its_images(make_experience: Callable[..., Experience]) -> None:
    picture = Picture.of(bytes(3), 1, 1)
    prompts = [Problem(id=number, question="?", answer="7") for number in (1, 2)]
    batch = PromptBatch(step=0, prompts=prompts, valid=[True, True])
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0)
    rewards = [ExactReward(correctness=True)]
    texts = {1: ["7", "no"], 2: ["7", "no"]}
    samples = make_experience(texts, batch=batch, rewards=rewards, algorithm=algorithm, max_completion_length=4).samples
    outputs = {"sampled": grade(rewards, samples), "greedy": None}
    shown = [replace(prompts[0], columns={"images": (picture,)}), prompts[1]]
    batch = PromptBatch(step=0, prompts=shown, valid=[True, True])
    assert [answers_row(batch, number, outputs).get("images") for number in (0, 1)] == [[picture.sha256], None]


def test_what_a_resumed_run_validates_again_takes_the_place_of_what_was(tmp_path: Path) -> None:
    log = HeldOutLog(tmp_path / "held_out.jsonl")
    for step in (0, 2, 4, 2):
        log._write({"step": step, "answers": [step]})
    assert list(read_rows(log.path)) == [{"step": 0, "answers": [0]}, {"step": 2, "answers": [2]}]


def test_pass_at_k_is_that_of_the_counts() -> None:
    """1 − C(n − c, k) / C(n, k): of 2 of 4 right pass@2 is 1 − 1/6; a problem with too few verdicts is left out."""
    curve = pass_curve([(2, 4), (0, 4), (1, 1)], 4)
    assert [k for k, *_ in curve] == [1, 2, 4]
    assert [value for _, value, *_ in curve] == pytest.approx([(0.5 + 0 + 1) / 3, (5 / 6) / 2, 0.5])
    assert all(low <= value <= high for _, value, low, high in curve)
    assert [k for k, *_ in pass_curve([(1, 3)], 3)] == [1, 2, 3]
    assert pass_curve([], 4) == []


UNPAID = [{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}]  # all 0: no update is made
THRICE = {"group_size": 4, "beta": 0.0, "num_iterations": 3}  # three updates a rollout


@pytest.mark.parametrize(
    ("interval", "pattern", "changes"),
    [
        (1, "vtvtvtv", {}),
        (2, "vttvtv", {"model__algorithm": THRICE}),
        (3, "vtttv", {}),
        (50, "vtttv", {"model__rewards": UNPAID}),
    ],
)
def test_both_ends_are_validated_once_and_updates_do_not_move_the_interval(
    command_line: Any, read_metrics: Any, interval: int, pattern: str, changes: dict[str, Any]
) -> None:
    """The rows of a run in order: v for a validation, t for a rollout."""
    changes |= {"model__cold_start": None, "model__sampling": {"max_completion_length": 4}, "data__steps": 3}
    config = command_line.config(f"every_{interval}", **changes)
    command_line.done("fit", "--config", config, f"--trainer.val_check_interval={interval}")
    rows = read_metrics(command_line.runs / f"every_{interval}" / "metrics.csv")
    assert "".join("v" if "val/pass@1" in row else "t" for row in rows) == pattern
