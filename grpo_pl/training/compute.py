"""``ChosenPrecision``: whether a run on a CPU computes in float32 or in bfloat16, found by measuring both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.copying import CopyEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.types import Problem, Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Compute = Literal["exact", "auto"]
"""``exact`` computes in the types that are configured; ``auto`` in bfloat16 where that is faster and close enough."""

LEAST_GAIN = 1.3
"""How many times as fast bfloat16 must be, for what it rounds away."""
MEAN_AT_MOST, P99_AT_MOST = 1e-2, 5e-2
"""Limits of the difference between sampled and scored log-probabilities, in nats."""
DRAWN = 16
"""Tokens of a completion of the measurement."""
MOST_PROMPTS = 64
MOST_TOKENS = 4096
MOST_WORK = 1.5e12
"""Of one measurement, in floating-point operations, 6 for a parameter and token; at least one completion is drawn."""
ROUNDS = 2
"""The first one warms up."""

_CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": partial(
        torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False
    ),  # as Lightning's plugin has it
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What bfloat16 gains and costs on a few of the run's own prompts."""

    gain: float
    """Seconds in float32 / seconds in bfloat16, for drawing some tokens and a forward and backward pass over them."""
    mean_error: float
    """Of |log π_scored − log π_sampled| over the tokens drawn, both in bfloat16."""
    p99_error: float
    equal_rows: float
    """Share of the completions that are the same tokens in both types."""

    @property
    def takes_bfloat16(self) -> bool:
        """Whether it is fast and close enough; NaN is not."""
        return self.gain >= LEAST_GAIN and self.mean_error <= MEAN_AT_MOST and self.p99_error <= P99_AT_MOST

    def __str__(self) -> str:
        return (
            f"measured: bfloat16 is {self.gain:.2f} times as fast, scores what it drew {self.mean_error:.1e} apart on "
            f"average and {self.p99_error:.1e} at the 99th percentile, and draws {self.equal_rows:.0%} of the "
            "completions of float32"
        )


class ChosenPrecision:
    """The precision of a run: as configured, or measured before its first step and then kept, over a resume as well.

    Args:
        compute: ``model.compute``.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.measured: Measured | None = None

    def choose(
        self,
        trainer: Trainer,
        policy: PreTrainedModel,
        sampler: CompletionSampler,
        problems: Iterable[Problem],
        *,
        group_size: int,
        sampling: SamplingParams,
        collective: Collective,
    ) -> None:
        """Measures where that was not done yet; every rank takes what rank 0 has found.

        Raises:
            ValueError: see `check_measurable`.
        """
        if self.compute == "exact":
            return
        if self.measured is None:
            check_measurable(trainer, policy, sampler)
            some = list(islice(problems, MOST_PROMPTS))
            found = measure(policy, sampler, some, group_size=group_size, sampling=sampling)
            self.measured = collective.gather_objects(found)[0]
        self.apply(trainer)

    def apply(self, trainer: Trainer) -> None:
        """Has steps, validation and prediction of ``trainer`` compute in what was chosen."""
        if self.compute == "auto" and self.measured is not None and self.measured.takes_bfloat16:
            trainer.strategy.precision_plugin = MixedPrecision("bf16-mixed", device="cpu")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.measured is None else asdict(self.measured)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint's run measured; nothing where it measured nothing."""
        self.measured = Measured(**state) if state else None


def check_measurable(trainer: Trainer, policy: PreTrainedModel, sampler: CompletionSampler) -> None:
    """Refuses ``auto`` where there is no choice between float32 and bfloat16 to make.

    Raises:
        ValueError: what to set instead.
    """
    kind, dtype = trainer.strategy.root_device.type, str(policy.dtype).removeprefix("torch.")
    reason = None
    if kind != "cpu":
        reason = f"measures on CPUs, and the policy is on {kind}: set trainer.precision bf16-mixed"
    elif isinstance(trainer.strategy, FSDP2Strategy):
        reason = "leaves FSDP2 its own types: set trainer.strategy.init_args.param_dtype bfloat16"
    elif dtype != "float32":
        reason = f"chooses for weights in float32, and these are in {dtype}: set model.policy.dtype float32"
    elif trainer.precision != "32-true":
        reason = f"chooses trainer.precision itself, which is {trainer.precision}: leave it out"
    elif isinstance(sampler.engine, CopyEngine):
        reason = f"chooses for an engine in this process, and {type(sampler.engine).__name__} has a process of its own"
    elif sampler.pool is not None:
        reason = "measures completions of a single turn, and model.environment has many: set trainer.precision yourself"
    if reason is not None:
        raise ValueError(f"model.compute: auto {reason}, or model.compute exact.")


def measure(
    policy: PreTrainedModel,
    sampler: CompletionSampler,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: SamplingParams,
) -> Measured:
    """Draws and trains on the same few tokens in both types, in turn, and leaves the policy as it is."""
    drawn = min(DRAWN, sampling.max_completion_length)
    temperature, sampling = sampling.temperature, replace(sampling, max_completion_length=drawn)
    draw = partial(sampler.sample, policy, sampling=sampling, seed=0, split="train")
    longest = drawn + max(map(len, sampler.prompt_ids(policy, problems, drawn)))
    tokens = min(MOST_TOKENS, MOST_WORK / (6 * sum(p.numel() for p in policy.parameters())))
    rows = max(1, int(tokens / longest))
    prompts, group = problems[: max(1, rows // group_size)], min(rows, group_size)
    seconds, rollouts = dict.fromkeys(_CONTEXTS, float("inf")), dict[str, Rollout]()
    for _ in range(ROUNDS):
        for name, context in _CONTEXTS.items():
            with context():
                start = time.perf_counter()
                rollouts[name] = draw(prompts, group_size=group).rollout
                _scored(policy, rollouts[name], temperature).sum().backward()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
            policy.zero_grad(set_to_none=True)
    exact, rounded = rollouts["float32"], rollouts["bfloat16"]
    with torch.no_grad(), _CONTEXTS["bfloat16"]():
        apart = (_scored(policy, rounded, temperature) - rounded.sampling_logprobs)[rounded.completion_mask].abs()
    width = min(exact.completion_ids.shape[1], rounded.completion_ids.shape[1])
    same = (exact.lengths == rounded.lengths) & (
        exact.completion_ids[:, :width] == rounded.completion_ids[:, :width]
    ).all(dim=1)
    return Measured(
        gain=seconds["float32"] / seconds["bfloat16"],
        mean_error=float(apart.mean()),
        p99_error=float(apart.quantile(0.99)),
        equal_rows=float(same.float().mean()),
    )


def _scored(policy: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    parts = rollout_rows(rollout, torch.arange(len(rollout.completion_ids)))
    return completion_logprobs(policy, **parts, temperature=temperature, with_entropy=False)[0]
