"""What only a GPU can show; ``pytest -m gpu --device cpu`` rehearses it elsewhere."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.files.checkpoints import remove, rollouts_of
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.functional.sampling import Noise, sample_key, score_gaps, token_keys
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams
from tests.kernels import named_keys

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
PROMPTS, GROUP, TOKENS = 16, 8, 32
KEYS = named_keys(PROMPTS, GROUP, seed=0)


def _draw(model: PreTrainedModel) -> Rollout:
    return NativeEngine().generate(
        model,
        GenerateRequest(
            prompt_ids=[[p + 5, 2 * p % 37 + 5, 7] for p in range(PROMPTS)],
            keys=KEYS,
            sampling=SamplingParams(max_completion_length=TOKENS),
            eos_token_ids=[],
            pad_token_id=0,
        ),
    )


def _score_gap(model: PreTrainedModel, rollout: Rollout, row: int, position: int) -> float:
    """By how much this token won its race."""
    drawn = rollout.completion_ids[row, : position + 1]
    context = torch.cat([rollout.prompt_ids[row][rollout.prompt_mask[row]], drawn[:-1]])
    with torch.no_grad():
        logits = model(context.unsqueeze(0)).logits[:, -1]
    key = torch.tensor([sample_key(KEYS[row // GROUP][row % GROUP])])
    return score_gaps(logits, Noise(token_keys(key, position)), temperature=1.0).item()


def test_the_gpu_draws_the_samples_of_the_cpu_up_to_near_ties(
    tiny_policy: PreTrainedModel, device: str, record_property: Callable[[str, object], None]
) -> None:
    """A row goes its own way only from a token on whose race was won by no more than rounding."""
    here, there = _draw(tiny_policy), _draw(copy.deepcopy(tiny_policy).to(device))
    differs = here.completion_ids != there.completion_ids.cpu()
    rows = differs.any(dim=1).nonzero().flatten().tolist()
    record_property("tokens", differs.numel())
    record_property("near_ties", len(rows))
    for row in rows:
        assert _score_gap(tiny_policy, here, row, int(differs[row].int().argmax())) < 1e-4
    assert len(rows) <= 2  # of 4,096 tokens
    torch.testing.assert_close(
        there.sampling_logprobs.cpu()[~differs.cummax(dim=1).values],
        here.sampling_logprobs[~differs.cummax(dim=1).values],
        atol=1e-4,
        rtol=0.0,
    )


def test_rollouts_leave_no_memory_behind(tiny_policy: PreTrainedModel, device: str) -> None:
    """What libraries keep for the stream of captures, they take once."""
    model, taken = copy.deepcopy(tiny_policy).to(device), []
    for _ in range(4):
        _draw(model)
        taken.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert taken[1] == taken[2] == taken[3]


def test_packed_logprobs_and_gradients_are_those_of_the_cpu(tiny_policy: PreTrainedModel, device: str) -> None:
    rollout = _draw(tiny_policy)
    rows = {name: getattr(rollout, name) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    found = []
    for model in (tiny_policy, copy.deepcopy(tiny_policy).to(device)):
        moved = {name: value.to(model.device) for name, value in rows.items()}
        logprobs, _ = completion_logprobs(model, **moved, temperature=0.9)
        logprobs.mean().backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
        found.append((logprobs.detach().cpu(), gradient))
    (ours, our_gradient), (theirs, their_gradient) = found
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0.0)
    assert (their_gradient - our_gradient).norm() / our_gradient.norm() < 1e-4


WAYS = {
    "single": ["--trainer.precision=bf16-mixed"],
    "fsdp": [f"--config={HERE.parent / 'configs/strategy/fsdp.yaml'}"],
    "sharded": [
        f"--config={HERE.parent / 'configs/strategy/fsdp.yaml'}",
        "--trainer.strategy.init_args.sharded_checkpoints=true",
    ],
}


def _fit(folder: Path, device: str, *flags: str) -> Path:
    """A run in a process of its own, under deterministic algorithms; its folder."""
    command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={HERE / 'faults' / 'tiny.yaml'}"]
    command += [f"--trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}", "--trainer.deterministic=true"]
    command += [*flags, "--data.steps=4", f"--runs_dir={folder}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "tiny"


@pytest.mark.parametrize("way", list(WAYS))
def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(
    tmp_path: Path, device: str, read_metrics: Callable[[Path], Any], way: str
) -> None:
    """On one GPU, in bfloat16 with float32 weights, and as FSDP2 with one process."""
    run = _fit(tmp_path, device, *WAYS[way])
    whole = read_checkpoint(run / "checkpoints" / "rollout-000004.ckpt")
    rows = read_metrics(run / "metrics.csv")
    for path in run.glob("checkpoints/rollout-*.ckpt"):
        if rollouts_of(path) > 2:
            remove(path)
    _fit(tmp_path, device, *WAYS[way], "--resume")
    again = read_checkpoint(run / "checkpoints" / "rollout-000004.ckpt")
    assert all(value.dtype == torch.float32 for value in whole["state_dict"].values() if value.is_floating_point())
    for name, value in whole["state_dict"].items():
        assert torch.equal(again["state_dict"][name], value), name
    (ours,), (theirs,) = again["optimizer_states"], whole["optimizer_states"]
    for number, entry in theirs["state"].items():
        for name, value in entry.items():
            assert torch.equal(ours["state"][number][name], value), (number, name)
    assert read_metrics(run / "metrics.csv") == rows
