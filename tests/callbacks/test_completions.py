"""``completions.jsonl``: what it holds of a rollout, and that it stays within its size and survives a resume."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_pl.callbacks.completions import CompletionsLog, completion_rows, flat_row
from grpo_pl.extras.images.picture import Picture
from grpo_pl.files.rows import read_rows
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward, FormatReward
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch
from tests.callbacks.conftest import WholeRun


@pytest.fixture
def experience(make_experience: Callable[..., Experience]) -> Experience:
    prompts = [Problem(id=1, question="3+4", answer="7"), Problem(id=2, question="2+3", answer="5")]
    return make_experience(
        {1: [r"</think>\boxed{7}", "no"], 2: [r"\boxed{9}", r"</think>\boxed{5}"]},
        batch=PromptBatch(step=4, prompts=prompts, valid=[True, True]),
        rewards=[ExactReward(correctness=True, weight=2.0), FormatReward(weight=0.5, partial=True, require_box=False)],
        algorithm=GRPOAlgorithm(group_size=2, beta=0.0, scale="none"),
        max_completion_length=12,
        template=PromptTemplate(user="Q {question}", prefill="<think>"),
    )


def test_a_row_says_what_was_asked_written_and_given(experience: Experience) -> None:
    right, wrong, *_ = completion_rows(experience, groups=2)
    assert right == {
        "step": 4,
        "prompt_id": 1,
        "sample": 0,
        "prompt": "Q 3+4<think>",
        "question": "3+4",
        "answer": "7",
        "completion": r"<think></think>\boxed{7}",
        "tokens": 11,  # a tag, nine characters and the end
        "finish_reason": "stop",
        "rewards": {
            "exact": {"value": 1.0, "status": "ok", "detail": "7"},
            "format": {"value": 0.25, "status": "no_answer", "detail": "no answer"},
        },
        "correct": True,
        "reward": 2.125,
        "advantage": 1.0,
    }
    assert (wrong["correct"], wrong["reward"], wrong["advantage"]) == (False, 0.125, -1.0)
    assert flat_row(wrong)["status/exact"] == "no_answer"


def test_only_so_many_groups_are_written_each_with_all_its_completions(experience: Experience) -> None:
    assert [(row["prompt_id"], row["sample"]) for row in completion_rows(experience, groups=1)] == [(1, 0), (1, 1)]
    assert len(completion_rows(experience, groups=9)) == 4
    assert completion_rows(experience, groups=0) == []


def test_advantages_of_steps_are_shown_as_their_mean(experience: Experience) -> None:
    mask = experience.rollout.completion_mask
    advantages = torch.zeros(mask.shape)
    advantages[0, 0], advantages[0, -1] = 10.0, 10.0
    object.__setattr__(experience, "advantages", advantages)
    assert completion_rows(experience, groups=1)[0]["advantage"] == pytest.approx(20 / 11)  # over eleven tokens


@pytest.mark.parametrize("arguments", [{"groups_per_rollout": -1}, {"max_megabytes": 0.0}])
def test_limits_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="completions needs"):
        CompletionsLog(**arguments)


def test_a_file_at_its_limit_covers_the_run_with_fewer_rollouts(command_line: Any) -> None:
    config = command_line.config("thinned", data__steps=7, checkpoint={"every_n_rollouts": 7})
    options = ["--completions.max_megabytes=0.02", "--trainer.limit_val_batches=0"]
    command_line.done("fit", "--config", config, *options)
    file = command_line.runs / "thinned" / "completions.jsonl"
    assert file.stat().st_size <= 20_000
    steps = sorted({row["step"] for row in read_rows(file)})
    assert steps[1] > 1 and steps == list(range(0, 7, steps[1]))


def test_a_resumed_run_writes_each_rollout_once(whole: WholeRun) -> None:
    run = whole.commands.runs / "resumed"
    shutil.copytree(whole.folder, run, symlinks=True)
    for name in ("000003", "000004"):
        for path in (run / "checkpoints").glob(f"*-{name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    whole.commands.done("fit", "--config", whole.config, "--name=resumed", "--resume")
    written = (run / "completions.jsonl").read_text()
    assert written == (whole.folder / "completions.jsonl").read_text()
    assert {json.loads(line)["step"] for line in written.splitlines()} == {0, 1, 2, 3}


def _seen(make_experience: Callable[..., Experience], step: int, *pictures: Picture) -> Experience:
    """As of a policy that reads images, though these were drawn from one of text."""
    prompts = [Problem(id=i, question="?", answer="7") for i in (*range(1, len(pictures) + 1), 9)]
    experience = make_experience(
        {prompt.id: ["7", "no"] for prompt in prompts},
        batch=PromptBatch(step=step, prompts=prompts, valid=[True] * len(prompts)),
        rewards=[ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=2, beta=0.0, scale="none"),
        max_completion_length=4,
    )
    columns = [*({"images": (one,)} for one in pictures), {"images": ["a column of text runs"]}]
    shown = [replace(prompt, columns=own) for prompt, own in zip(prompts, columns, strict=True)]
    return replace(experience, samples=replace(experience.samples, prompts=shown))


def test_a_row_names_its_images_and_small_copies_lie_beside_the_file(
    make_experience: Callable[..., Experience], tmp_path: Path
) -> None:
    small, large = Picture.of(bytes(12), 2, 2), Picture.of(bytes(3 * 400 * 100), 400, 100)
    experience = _seen(make_experience, 0, small, large, small)
    assert [row.get("images") for row in completion_rows(experience, groups=4)] == [
        *([small.sha256],) * 2,
        *([large.sha256],) * 2,
        *([small.sha256],) * 2,
        *(None,) * 2,
    ]
    log = CompletionsLog(groups_per_rollout=4)
    log.path = tmp_path / "completions.jsonl"
    trainer: Any = SimpleNamespace(is_global_zero=True)
    log.on_train_batch_end(trainer, None, {"experience": experience}, None, 0)  # type: ignore[arg-type]
    assert {file.name for file in (tmp_path / "images").iterdir()} == {f"{p.sha256}.png" for p in (small, large)}
    assert (tmp_path / "images" / f"{small.sha256}.png").read_bytes() == small.png
    from PIL import Image

    assert Image.open(tmp_path / "images" / f"{large.sha256}.png").size == (192, 48)


def test_images_stay_within_the_size_and_go_with_their_rows(
    make_experience: Callable[..., Experience], tmp_path: Path
) -> None:
    rows = [_seen(make_experience, step, Picture.of(bytes([step] * 12), 2, 2)) for step in range(6)]
    size = len("".join(json.dumps(row) + "\n" for row in completion_rows(rows[0], groups=1)))
    log = CompletionsLog(groups_per_rollout=1, max_megabytes=3.5 * size / 1e6)
    log.path = tmp_path / "completions.jsonl"
    trainer: Any = SimpleNamespace(is_global_zero=True)
    for experience in rows:
        log.on_train_batch_end(trainer, None, {"experience": experience}, None, 0)  # type: ignore[arg-type]
    named = {digest for row in read_rows(log.path) for digest in row["images"]}
    assert {file.stem for file in (tmp_path / "images").iterdir()} == named and len(named) == 2
    log = CompletionsLog(groups_per_rollout=1, max_megabytes=1e-3)
    log.path = tmp_path / "other" / "completions.jsonl"
    noise = Picture.of(random.Random(0).randbytes(3 * 40 * 40), 40, 40)
    log.path.parent.mkdir()
    log.on_train_batch_end(trainer, None, {"experience": _seen(make_experience, 0, noise)}, None, 0)  # type: ignore[arg-type]
    assert len(noise.png) > 1000 and log.path.is_file() and not (tmp_path / "other" / "images").exists()
