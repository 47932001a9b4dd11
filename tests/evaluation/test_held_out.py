"""Held-out metrics: groups, what judges make of completions, the report and its comparison."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.evaluation.held_out import Answers, HeldOutMetrics, MetricResult, Validation, grade
from grpo_pl.evaluation.report import EvaluationReport, comparability_warnings, difference_table, report_table
from grpo_pl.rewards import FormatReward, LengthReward, MathReward
from grpo_pl.rollout.decoding import completion_mask
from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import Problem, PromptBatch, Rollout

CPU = torch.device("cpu")
UNJUDGED = 99


def _answers(classes: Sequence[Sequence[int]]) -> Answers:
    table = torch.tensor(classes)
    return Answers(
        correct=table == 0,
        judged=table != UNJUDGED,
        classes=table,
        lengths=torch.full_like(table, 5),
        truncated=torch.zeros_like(table).bool(),
    )


def _batch(groups: Sequence[Sequence[str]], valid: Sequence[bool]) -> PromptBatch:
    prompts = [Problem(id=10 + i, question="?", answer="!") for i in range(len(groups))]
    return PromptBatch(step=0, prompts=prompts, valid=valid, groups=groups)


def test_every_group_gets_its_own_metrics_and_fillers_get_none() -> None:
    metrics = HeldOutMetrics(Validation(samples=3), [MathReward()], ["val", "val/easy"], CPU)
    batch = _batch([("val",), ("val", "val/easy"), ("val", "val/easy")], [True, True, False])
    metrics.update(batch, _answers([[0, 1, 1], [0, 0, -1], [1, 1, 1]]), _answers([[1], [0], [0]]))
    means = {key: found.mean for key, found in metrics.results().items()}
    names = ("pass@1", "pass@3", "maj@3", "mean_length", "clipped_ratio", "greedy")
    everyone, easy = (0.5, 1.0, 0.5, 5.0, 0.0, 0.5), (2 / 3, 1.0, 1.0, 5.0, 0.0, 1.0)
    expected = {f"val/{name}": value for name, value in zip(names, everyone, strict=True)}
    expected |= {f"val/easy/{name}": value for name, value in zip(names, easy, strict=True)}
    assert means == pytest.approx(expected)
    assert metrics.results()["val/greedy"].problems == {10: 0.0, 11: 1.0}


def test_completions_without_a_verdict_count_nowhere_and_are_counted() -> None:
    metrics = HeldOutMetrics(Validation(samples=3), [MathReward()], ["val", "val/easy"], CPU)
    batch = _batch([("val",), ("val", "val/easy"), ("val",)], [True, True, False])
    sampled = _answers([[0, 1, UNJUDGED], [UNJUDGED] * 3, [UNJUDGED] * 3])
    metrics.update(batch, sampled, _answers([[0], [UNJUDGED], [1]]))
    means = {key: found.mean for key, found in metrics.results().items()}
    assert means == {
        "val/pass@1": 0.5,  # the second problem says nothing, and a problem with two verdicts nothing of three draws
        "val/mean_length": 5.0,
        "val/clipped_ratio": 0.0,
        "val/greedy": 1.0,
        "val/easy/mean_length": 5.0,
        "val/easy/clipped_ratio": 0.0,
    }
    assert metrics.unjudged() == {"val": 5, "val/easy": 4}


def test_one_sample_needs_no_vote_and_k_must_fit() -> None:
    keys = HeldOutMetrics(Validation(samples=1, greedy=False), [MathReward()], ["val"], CPU).metrics
    assert list(keys) == ["val/pass@1", "val/mean_length", "val/clipped_ratio"]
    assert Validation(samples=8, pass_at=[4, 1, 2]).ks == [1, 2, 4]
    with pytest.raises(ValueError, match=r"pass_at holds 8: pass@k needs 1 <= k <= samples=4"):
        Validation(samples=4, pass_at=[8])
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        Validation(samples=0)


def test_completions_are_judged_counted_and_grouped_by_answer() -> None:
    ids = torch.tensor([[5, 1, 0], [5, 5, 5], [5, 5, 1], [1, 0, 0]])
    mask = completion_mask(ids, [1])
    rollout = Rollout(
        group_size=4,
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=ids,
        completion_mask=mask,
        sampling_logprobs=torch.zeros(4, 3),
        finish_reasons=["stop", "length", "stop", "stop"],
    )
    samples = Samples(
        prompts=[Problem(id=3, question="1+1", answer="2")],
        prompt_texts=["1+1"],
        rollout=rollout,
        completions=[r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{2}", ""],
        step=0,
    )
    summed = grade([FormatReward(partial=True)], samples)
    assert not summed.correct.any() and [score.value for score in summed.scores] == [0.0] * 4
    assert {name: values.tolist() for name, values in summed.rewards.items()} == {
        "reward": [[0.0] * 4],
        "rewards/format": [[0.0] * 4],
    }
    found = grade([MathReward()], samples)
    assert found.rewards == {} and found.judged.all()
    assert found.correct.tolist() == [[False, False, True, False]] and found.classes.tolist() == [[1, 1, 0, -1]]
    assert found.lengths.tolist() == [[2, 3, 3, 1]] and found.truncated.tolist() == [[False, True, False, False]]


def test_without_a_correctness_reward_the_rewards_are_measured_and_nothing_is_right() -> None:
    rewards = [FormatReward(partial=True), LengthReward(shape="budget", max_length=4, weight=0.5)]
    metrics = HeldOutMetrics(Validation(samples=2), rewards, ["val", "val/rewards"], CPU)
    names = ["reward", "rewards/format", "rewards/length", "mean_length", "clipped_ratio"]
    assert list(metrics.metrics) == [f"{group}/{name}" for group in ("val", "val/rewards") for name in names]
    found = {
        "reward": torch.tensor([[1.5, 0.5], [math.nan, 0.25]]),
        "rewards/format": torch.tensor([[1.0, 0.0], [math.nan, 0.0]]),
        "rewards/length": torch.tensor([[1.0, 1.0], [0.5, 0.5]]),
    }
    blank = torch.zeros(2, 2)
    answers = Answers(
        correct=blank.bool(),
        judged=~found["reward"].isnan(),
        classes=blank.long(),
        lengths=blank.long() + 5,
        truncated=blank.bool(),
        rewards=found,
    )
    metrics.update(_batch([("val",), ("val", "val/rewards")], [True, True]), answers, None)
    means = {key: result.mean for key, result in metrics.results().items()}
    assert means["val/reward"] == pytest.approx((1.0 + 0.25) / 2)
    assert means["val/rewards/format"] == pytest.approx((0.5 + 0.0) / 2)
    assert means["val/rewards/reward"] == 0.25 and means["val/rewards/rewards/length"] == 0.5
    assert metrics.counts() == {} and metrics.unjudged() == {"val": 1, "val/rewards": 1}


def _report(values: Mapping[int, float], question: str = "?") -> EvaluationReport:
    found = MetricResult(mean=sum(values.values()) / len(values), problems=dict(values))
    questions = {"val": {identity: f"{identity}{question}" for identity in values}}
    return EvaluationReport(measured={"val/greedy": found}, questions=questions, facts={"samples": 1})


def test_a_report_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    report = _report({1: 1.0, -5: 0.0}, question="¿?")
    report.write(tmp_path / "deep" / "report.json")
    assert EvaluationReport.read(tmp_path / "deep" / "report.json") == report
    tree = json.loads((tmp_path / "deep" / "report.json").read_text())
    entry = tree["metrics"]["val/greedy"]
    assert (entry["value"], entry["interval"]) == (0.5, "95 % wilson")
    assert entry["low"] < 0.5 < entry["high"]


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json was not written by"):
        EvaluationReport.read(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"other\.json is not JSON"):
        EvaluationReport.read(file)


def test_a_difference_is_taken_over_the_common_problems_if_there_are_any() -> None:
    gap = _report({1: 1.0, 2: 1.0, 3: 0.0}).differences(_report({2: 0.0, 3: 0.0, 4: 1.0}))["val/greedy"]
    assert (gap.value, gap.problems) == (0.5, 2)
    with pytest.raises(ValueError, match="different problems"):
        _report({1: 1.0}).differences(_report({2: 1.0}))
    with pytest.raises(ValueError, match=r"problem 1 of val is '1\?' here and '1!' in the baseline"):
        _report({1: 1.0}).differences(_report({1: 1.0}, question="!"))


def test_what_weakens_a_comparison_is_said() -> None:
    assert comparability_warnings(_report({1: 1.0}), _report({1: 0.0, 2: 1.0})) == []
    other = replace(_report({1: 0.0}), facts={"samples": 4})
    assert comparability_warnings(_report({1: 1.0, 2: 1.0, 3: 0.0}), other) == [
        "only 1 of 3 problems of val are in the baseline.",
        "the baseline was measured with samples 4, this with 1.",
    ]


def test_tables_show_values_intervals_and_differences() -> None:
    report, baseline = _report(dict.fromkeys(range(20), 1.0)), _report(dict.fromkeys(range(20), 0.0))
    rows = [list(column.cells) for column in report_table(report).columns]
    assert rows == [["val/greedy"], ["1.000"], ["0.839 … 1.000"], ["20"]]
    rows = [list(column.cells) for column in difference_table(report, baseline).columns]
    assert rows[:3] == [["val/greedy"], ["0.000"], ["+1.000"]]


def test_validate_prints_intervals_writes_problems_and_compares(command_line: Any, tmp_path: Path) -> None:
    source = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 2}}
    config = command_line.config("validate", data__validation_sets={"long": source})
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = command_line.done("validate", f"--config={config}", f"--output={first}")
    assert "95 % interval" in done.out and "val/long/pass@1" in done.out
    assert not (command_line.runs / "validate").exists()  # no run is made of it
    done = command_line.done("validate", f"--config={config}", f"--output={second}", f"--baseline={first}")
    assert "difference to the baseline" in done.out
    reports = [EvaluationReport.read(file) for file in (first, second)]
    assert reports[0].measured == reports[1].measured
    assert len(reports[0].measured["val/long/greedy"].problems) == 6
    assert all(gap.value == 0.0 for gap in reports[1].differences(reports[0]).values())


def test_validate_leaves_out_what_could_not_be_judged_and_says_how_much(command_line: Any, tmp_path: Path) -> None:
    """A judge that knows every second completion: pass@1 is 1 over those, not 0.5."""
    (tmp_path / "judge.py").write_text(
        "def grade(completions):\n    return [1.0 if i % 2 else None for i in range(len(completions))]\n"
    )
    init = {"function": f"{tmp_path}/judge.py:grade", "correctness": True}
    rewards = [{"class_path": "grpo_pl.rewards.FunctionReward", "init_args": init}]
    config = command_line.config("half_judged", model__rewards=rewards)
    done = command_line.done("validate", f"--config={config}", f"--output={tmp_path / 'half.json'}")
    measured = EvaluationReport.read(tmp_path / "half.json").measured
    assert measured["val/pass@1"].problems == dict.fromkeys(measured["val/pass@1"].problems, 1.0)
    assert len(measured["val/pass@1"].problems) == 6
    unjudged = json.loads((tmp_path / "half.json").read_text())["unjudged"]["val"]
    assert unjudged > 0
    assert f"val: {unjudged} completions could not be judged" in done.out


def test_validate_says_what_is_wrong_with_its_files(command_line: Any, tmp_path: Path) -> None:
    for option, told in (
        (f"--baseline={tmp_path / 'none.json'}", f"there is no file {tmp_path / 'none.json'}."),
        (f"--output={tmp_path}", f"--output {tmp_path} is a folder: name a file."),
    ):
        done = command_line("validate", f"--config={command_line.config()}", option)
        assert (done.status, done.err) == (1, f"grpo-pl validate: error: {told}\n")
