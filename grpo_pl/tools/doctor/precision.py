"""Measures how many times as fast this machine's CPU computes a run's steps in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rollout.copy_engine import CopyEngine
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Problem

LEAST_PARAMETERS = 10_000_000
"""Smaller policies hardly gain: one of 3 million was 1.08 times as fast."""
DRAWN = 16
"""Tokens of a completion of the measurement."""
MOST_TOKENS, MOST_WORK = 4096, 1.5e12
"""Of one measurement; work in floating-point operations, 6 for a parameter and token."""
ROUNDS = 2
"""The first one warms up."""


def bfloat16_gain(
    trainer: Trainer, module: GRPOModule, problems: Sequence[Problem], should_stop: Callable[[], bool]
) -> float | None:
    """Seconds of a step in float32 / seconds in bfloat16: completions are drawn and trained on in both, and the times
    scaled to the full length; None where the run or the CPU leaves no choice, or nothing can be gained.

    Raises:
        RolloutInterrupted: ``should_stop`` turned true.
    """
    policy, sampler, sampling = module.require_policy(), module.sampler, module.sampling
    parameters = sum(weight.numel() for weight in policy.parameters())
    if (
        policy.device.type != "cpu"
        or not multiplies_bfloat16()
        or parameters < LEAST_PARAMETERS
        or policy.dtype != torch.float32
        or trainer.precision != "32-true"
        or trainer.world_size > 1
        or is_sharded(policy)
        or module.environment is not None
        or isinstance(sampler.engine, CopyEngine)  # draws in a process of its own
    ):
        return None
    full, drawn = sampling.max_completion_length, min(DRAWN, sampling.max_completion_length)
    prompt = max(map(len, sampler.prompt_ids(policy, problems, drawn)))
    rows = max(1, int(min(MOST_TOKENS, MOST_WORK / (6 * parameters)) / (prompt + drawn)))
    group = min(rows, module.algorithm.group_size)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "float32": nullcontext,
        "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    seconds = dict.fromkeys(contexts, float("inf"))
    for _ in range(ROUNDS):
        for name, context in contexts.items():
            with context():
                start = time.perf_counter()
                rollout = sampler.sample(
                    policy,
                    problems[: max(1, rows // group)],
                    group_size=group,
                    sampling=replace(sampling, max_completion_length=drawn),
                    seed=0,
                    split="train",
                    should_stop=should_stop,
                ).rollout
                between = time.perf_counter()
                parts = rollout_rows(rollout, torch.arange(len(rollout.completion_ids)))
                temperature = sampling.temperature
                completion_logprobs(policy, **parts, temperature=temperature, with_entropy=False)[0].sum().backward()
                trained = time.perf_counter() - between
            step = (between - start) * full / drawn + trained * (prompt + full) / (prompt + drawn)
            seconds[name] = min(seconds[name], step)
            policy.zero_grad(set_to_none=True)
    return seconds["float32"] / seconds["bfloat16"]
