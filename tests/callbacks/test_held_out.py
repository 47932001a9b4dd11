"""``held_out.jsonl``: what each validation of a run found, its size, and a resumed run; held-out numbers before
the first rollout and after the last, each once, whatever the interval."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.callbacks.held_out import HeldOutLog, pass_curve
from grpo_pl.files.rows import read_rows


@pytest.fixture(scope="module")
def rows(command_line: Any) -> list[dict[str, Any]]:
    command_line.done("fit", "--config", command_line.config("kept"), "--trainer.logger=user_parts.TableLogger")
    return list(read_rows(command_line.runs / "kept" / "held_out.jsonl"))


def test_every_validation_has_its_estimates_and_problems(
    rows: list[dict[str, Any]], command_line: Any, read_metrics: Any
) -> None:
    assert [row["step"] for row in rows] == [0, 2, 4]
    logged = [row for row in read_metrics(command_line.runs / "kept" / "metrics.csv") if "val/pass@1" in row]
    for row, metrics in zip(rows, logged, strict=True):
        for name, found in row["metrics"].items():
            assert found["value"] == pytest.approx(float(metrics[name]), abs=1e-6)
            assert found["low"] <= found["value"] <= found["high"]
        right, judged = map(sum, zip(*row["problems"]["val"].values(), strict=True))
        assert right / judged == pytest.approx(float(metrics["val/pass@1"]), abs=1e-6)
        assert row["pass_at"]["val"][0][:2] == [1, pytest.approx(float(metrics["val/pass@1"]), abs=1e-6)]
        assert row["pass_at"]["val"][-1][0] == row["samples"]


def test_completions_are_kept_of_the_first_and_the_last(rows: list[dict[str, Any]]) -> None:
    assert [bool(row["answers"]) for row in rows] == [True, False, True]
    before, after = rows[0]["answers"], rows[-1]["answers"]
    assert [each["question"] for each in before] == [each["question"] for each in after]
    for each in (*before, *after):
        assert len(each["completions"]) == min(8, rows[0]["samples"])
        right, judged = next(row for row in rows if each in row["answers"])["problems"]["val"][str(each["id"])]
        assert sum(one["correct"] is True for one in each["completions"]) == right
        assert sum(one["correct"] is not None for one in each["completions"]) == judged
        assert {"completion", "tokens", "finish_reason", "value", "status"} <= each["greedy"].keys()


def test_loggers_with_tables_get_them_too(rows: list[dict[str, Any]]) -> None:
    import user_parts

    tables = [(step, columns, data) for key, columns, data, step in user_parts.TABLES if key == "held_out"]
    user_parts.TABLES.clear()
    assert [step for step, _, _ in tables] == [0, 2, 4]
    _, columns, data = tables[0]
    assert columns[:5] == ["group", "id", "question", "answer", "greedy"]
    first = rows[0]["answers"][0]
    texts = [one["completion"] for one in (*first["completions"], first["greedy"])]
    assert [line[columns.index("completion")] for line in data][: len(texts)] == texts


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


def test_validate_writes_none(command_line: Any, tmp_path: Path) -> None:
    command_line.done("validate", "--config", command_line.config("only"))
    assert not (command_line.runs / "only").exists()


SHORT: dict[str, Any] = {
    "model__cold_start": None,
    "model__sampling": {"max_completion_length": 4},
    "data__steps": 3,
}


def _pattern(command_line: Any, read_metrics: Callable[[Path], list[dict[str, str]]], name: str, **changes: Any) -> str:
    """The rows of a run in order: v for a validation, t for a rollout."""
    command_line.done("fit", "--config", command_line.config(name, **{**SHORT, **changes}))
    rows = read_metrics(command_line.runs / name / "metrics.csv")
    return "".join("v" if "val/pass@1" in row else "t" for row in rows)


@pytest.mark.parametrize(("interval", "pattern"), [(1, "vtvtvtv"), (2, "vttvtv"), (3, "vtttv"), (50, "vtttv")])
def test_both_ends_are_validated_once(command_line: Any, read_metrics: Any, interval: int, pattern: str) -> None:
    trainer = {"accelerator": "cpu", "val_check_interval": interval}
    assert _pattern(command_line, read_metrics, f"every_{interval}", trainer=trainer) == pattern


def test_a_run_without_any_update_is_validated_at_its_end_too(command_line: Any, read_metrics: Any) -> None:
    rewards = [{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}]  # all 0
    trainer = {"accelerator": "cpu", "val_check_interval": 50}
    assert _pattern(command_line, read_metrics, "idle", model__rewards=rewards, trainer=trainer) == "vtttv"


def test_several_updates_a_rollout_do_not_move_the_interval(command_line: Any, read_metrics: Any) -> None:
    algorithm = {"group_size": 4, "beta": 0.0, "num_iterations": 3}
    assert _pattern(command_line, read_metrics, "busy", model__algorithm=algorithm) == "vttvtv"
