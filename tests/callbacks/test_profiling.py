"""Where the time of a step goes, and the fraction of the machine's limit that it reaches."""

import io
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from grpo_pl.callbacks.profiling import (
    Limits,
    StageProfile,
    Work,
    bound,
    measure_limits,
    multiplied_parameters,
    work_of,
)
from tests.callbacks.conftest import WholeRun
from tests.gradient_step import qwen, rollout_of


def _policy(*, tied: bool) -> PreTrainedModel:
    return qwen(vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=1, tie_word_embeddings=tied)


BLOCK = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12  # query, key and value, output, MLP


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_of_products_count_and_the_head_once(tied: bool) -> None:
    assert multiplied_parameters(_policy(tied=tied)) == BLOCK + 10 * 8


def test_the_work_of_a_step_counts_prompts_once_and_active_rows_only() -> None:
    rollout = rollout_of([[5] * 3, [5] * 3, [6] * 4, [6] * 4], [[1] * n for n in (2, 3, 1, 2)], group_size=2)
    experience: Any = SimpleNamespace(rollout=rollout, active=torch.tensor([True, False, False, False]))
    work = work_of(experience, passes=2)
    assert work == Work(decoding=Counter({3: 1, 1: 1}), prefilled=7, updated=2 * (2 + 3))  # of (4, 3, 1) rows


def test_bounds_by_hand() -> None:
    policy = _policy(tied=True)
    n = BLOCK + 80
    limits = Limits(flops=4.0 * n, weights_per_second=2.0 * n)  # a pass over the weights takes half a second
    work = Work(decoding=Counter({4: 2, 1: 3}), prefilled=6, updated=10)
    rollout, update = bound(work, policy, limits)
    assert rollout == pytest.approx(6 / 2 + 2 * 4 / 2 + 3 * 0.5)  # prompts; four rows compute; one row reads
    assert bound(work + work, policy, limits) == pytest.approx((2 * rollout, 2 * update))
    assert update == pytest.approx(6 * 10 / 4)
    policy.get_input_embeddings().weight.requires_grad_(False)
    assert bound(work, policy, limits)[1] == pytest.approx(4 * 10 / 4)


def test_limits_are_measured() -> None:
    limits = measure_limits(_policy(tied=True))
    assert limits.flops > 1e8 and limits.weights_per_second > 1e5


def test_the_table_adds_up_to_the_step() -> None:
    profile = StageProfile()
    profile.steps, profile.wall = 2, 10.0
    profile.seconds = {"step": 8.0, "rollout": 3.0, "reward": 1.0, "logprobs": 0.0, "backward": 2.0, "optimizer": 0.5}
    console = Console(file=io.StringIO(), width=100)
    console.print(profile.table(rollout=1.5, backward=1.0))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    cells = {line[0]: line[1:] for line in (re.split(r"\s*[│┃]\s*", row.strip("│ ")) for row in text.splitlines())}
    assert cells["rollout"] == ["1.500", "30.0%", "50%"]
    assert cells["forward and backward"] == ["1.000", "20.0%", "50%"]
    assert cells["idle"][:2] == ["0.750", "15.0%"]
    assert cells["between steps"][:2] == ["1.000", "20.0%"]


def test_fit_prints_a_profile_when_asked(whole: WholeRun, command_line: Any) -> None:
    out = whole.outcome.out
    assert "time of a step, mean of 3" in out and len(re.findall(r"\d+%", out)) >= 2
    for name in ("rollout", "reward", "forward and backward", "optimiser", "idle", "between steps"):
        assert name in out
    options = ["--profile", "--data.steps=1", "--trainer.limit_val_batches=0"]
    assert "needs two steps" in command_line.done("fit", "--config", command_line.config("short"), *options).out
