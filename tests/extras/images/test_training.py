"""Whole runs on images: cold start, rollouts, updates, resuming, exports and the verbs that read them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from grpo_pl.cli.main import main
from grpo_pl.data.tasks.shapes import ShapePrompts
from tests.conftest import CommandLine
from tests.images import training
from tests.training.runs import ReadMetrics, assert_same_end, resumed

LENGTH = {"model__sampling": {"max_completion_length": 24}}


def _fit(command_line: CommandLine, name: str, *options: object, **changes: Any) -> Path:
    config = command_line.config(name, **{**training(), **LENGTH, **changes})
    command_line.done("fit", "--config", config, *options)
    return command_line.runs / name


@pytest.fixture(scope="module")
def run(command_line: CommandLine) -> Path:
    return _fit(command_line, "seeing")


def test_a_run_learns_from_images_and_goes_on_to_the_same_bits(
    command_line: CommandLine, read_metrics: ReadMetrics, run: Path
) -> None:
    again, whole = resumed(command_line, read_metrics, run)
    assert_same_end(run, again)
    assert any(float(row["grad_norm"]) > 0 for row in whole)
    assert (run / "export" / "model.safetensors").read_bytes() == (again / "export" / "model.safetensors").read_bytes()
    first, last = (
        torch.load(run / f"checkpoints/rollout-{at:06d}.ckpt", weights_only=True)["state_dict"] for at in (1, 4)
    )
    moved = {name for name, weight in last.items() if not torch.equal(weight, first[name])}
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name for name in moved), part


def test_a_record_of_a_sample_says_what_was_seen(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    seen = [row for row in rows if row["prompt"].startswith("<image>")]
    assert 0 < len(seen) < len(rows)


def test_the_export_is_a_model_of_transformers_and_answers_as_the_checkpoint(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert type(model).__name__ == "SmolVLMForConditionalGeneration"
    answers = []
    for source in (run / "export", run / "checkpoints" / "last.ckpt"):
        out = tmp_path / f"{source.name}.jsonl"
        options = (f"--config={run / 'config.yaml'}", "--prompts=6", "--samples=2", f"--output={out}")
        command_line.done("predict", f"--model={source}", *options)
        answers.append([json.loads(line) for line in out.read_text().splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) >= 12


def test_a_file_of_images_is_evaluated_as_the_policy_answers_it(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    rows = []
    for number, problem in enumerate(ShapePrompts(questions=("count",)).validation(6)):
        (tmp_path / f"{number}.png").write_bytes(problem.columns["images"][0].png)
        rows.append({"id": problem.id, "problem": problem.question, "answer": problem.answer, "image": f"{number}.png"})
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    results = []
    for images in ([*range(6)], [*range(1, 6), 0]):
        turned = [{**row, "image": f"{images[number]}.png"} for number, row in enumerate(rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in turned))
        options = (f"--data={file}", "--n=8", "--temperature=4", f"--output={out}")
        command_line.done("evaluate", f"--model={run / 'export'}", *options)
        results.append([json.loads(line) for line in out.read_text().splitlines()])
    right, other = ([[s["completion"] for s in row["samples"]] for row in result] for result in results)
    assert [len(samples) for samples in right] == [8] * 6 and right != other
    file.write_text(json.dumps({**rows[0], "image": "none.png"}) + "\n")
    refused = command_line("evaluate", f"--data={file}", f"--model={run / 'export'}", f"--output={out}")
    assert refused.status == 1 and "row 1 of" in refused.err and "none.png" in refused.err


def test_held_out_images_are_answered_again_from_the_checkpoint(command_line: CommandLine, run: Path) -> None:
    checkpoint = run / "checkpoints" / "last.ckpt"
    done = command_line.done("validate", "--config", run / "config.yaml", f"--ckpt_path={checkpoint}")
    with (run / "metrics.csv").open(newline="") as lines:
        last = [row["val/pass@1"] for row in csv.DictReader(lines) if row["val/pass@1"]][-1]
    assert f"{float(last):.3f}" in done.out


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("adapters", training(lora={"rank": 2})),
        ("ahead", {"data__staleness": 1}),
        ("groups", {"model__algorithm": {"group_size": 4, "beta": 0.05, "dynamic_sampling": True}}),
        pytest.param(
            "in_parts", {"model__partial_rollouts": {"part_length": 8, "steps_in_flight": 2}}, marks=pytest.mark.slow
        ),
        pytest.param("frozen", training(train_vision=False), marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_train_go_on_to_the_same_bits(
    command_line: CommandLine, read_metrics: ReadMetrics, forked: None, name: str, changes: dict[str, Any]
) -> None:
    run = _fit(command_line, name, **changes)
    again, _ = resumed(command_line, read_metrics, run)
    assert_same_end(run, again)


def test_a_policy_that_reads_images_of_data_without_any_is_refused(command_line: CommandLine) -> None:
    sums = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 1}}
    config = command_line.config("blind", **{**training(), **LENGTH, "data__source": sums})
    refused = command_line("fit", "--config", config)
    assert refused.status == 1 and "none of the first 4 problems has an image" in refused.err


def test_a_policy_of_text_refuses_data_with_images(command_line: CommandLine) -> None:
    config = command_line.config("text", **LENGTH, data__source=training()["data__source"])
    refused = command_line("fit", "--config", config)
    assert refused.status == 1 and "set model.policy.images true" in refused.err


@pytest.mark.parametrize(
    "changes",
    [
        {"model__engine": {"class_path": "grpo_pl.extras.engines.vllm.VLLMEngine"}},
        {"model__max_tokens_per_microbatch": 30},
        {"model__sampling": {"max_completion_length": 155}},
    ],
)
def test_what_images_do_not_go_with_ends_before_the_run(command_line: CommandLine, changes: dict[str, Any]) -> None:
    config = command_line.config("refused", **{**training(), **LENGTH, **changes})
    refused = command_line("fit", "--config", config)
    assert refused.status == 1 and len(refused.err.strip().splitlines()) == 1


def test_a_completion_is_drawn_again_and_explained(
    command_line: CommandLine, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_PL_CACHE", str(command_line.cache))
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    seen = next(number for number, row in enumerate(rows, start=1) if row["prompt"].startswith("<image>"))
    assert main(["why", str(run), f"--completion={seen}"]) == 0
    assert "the same tokens" in capsys.readouterr().out
