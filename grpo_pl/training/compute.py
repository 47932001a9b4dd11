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
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.logprobs import completion_logprobs, forget_forward_mode, was_tried
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

_CONTEXTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "float32": nullcontext,
    "bfloat16": MixedPrecision("bf16-mixed", device="cpu").forward_context,
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What bfloat16 gains and costs on a few of the run's own prompts."""

    gain: float
    """Seconds of a step in float32 / seconds in bfloat16."""
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
        self._configured: Precision | None = None  # the Trainer's, while another takes its place

    def choose(
        self,
        trainer: Trainer,
        policy: PreTrainedModel,
        sampler: CompletionSampler,
        problems: Iterable[Problem],
        *,
        group_size: int,
        sampling: SamplingParams,
        most_tokens: int | None,
        collective: Collective,
        should_stop: Callable[[], bool],
    ) -> None:
        """Measures where that was not done yet; every rank takes what rank 0 has found.

        Raises:
            ValueError: see `check_measurable`.
            RolloutInterrupted: ``should_stop`` turned true.
        """
        if self.compute == "exact":
            return
        check_measurable(trainer, policy, sampler)
        if self.measured is None:
            some = list(islice(problems, MOST_PROMPTS))
            took = partial(
                measure,
                policy,
                sampler,
                some,
                group_size=group_size,
                sampling=sampling,
                most_tokens=most_tokens,
                should_stop=should_stop,
            )
            found = collective.interruptible(took, policy.device)
            self.measured = collective.gather_objects(found)[0]
        self.apply(trainer)

    def apply(self, trainer: Trainer) -> None:
        """Has steps and validations of ``trainer`` compute in what was chosen, until `restore`; an explicit
        ``trainer.precision`` stays."""
        taken = self.compute == "auto" and self.measured is not None and self.measured.takes_bfloat16
        if taken and trainer.precision == "32-true" and trainer.strategy.root_device.type == "cpu":
            self._configured = trainer.strategy.precision_plugin
            trainer.strategy.precision_plugin = MixedPrecision("bf16-mixed", device="cpu")

    def restore(self, trainer: Trainer) -> None:
        """Gives the Trainer back the precision that it was configured with."""
        if self._configured is not None:
            trainer.strategy.precision_plugin, self._configured = self._configured, None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.measured is None else asdict(self.measured)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint's run measured; nothing where it measured nothing, or this one is exact."""
        self.measured = Measured(**state) if state and self.compute == "auto" else None


def check_compute(compute: Compute, policy: PolicyConfig, environment: object | None) -> None:
    """Refuses ``auto`` for a run that it cannot measure, before the run costs anything.

    Raises:
        ValueError: what to set instead.
    """
    if compute == "auto" and environment is not None:
        raise ValueError(
            "model.compute: auto measures completions of a single turn, and model.environment has many: set "
            "trainer.precision yourself, with model.compute exact."
        )
    if compute == "auto" and policy.dtype in ("bfloat16", "float16"):
        raise ValueError(_refused(_weights(policy.dtype)))


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
        reason = _weights(dtype)
    elif trainer.precision != "32-true":
        reason = f"chooses trainer.precision itself, which is {trainer.precision}: leave it out"
    elif isinstance(sampler.engine, CopyEngine):
        reason = f"chooses for an engine in this process, and {type(sampler.engine).__name__} has a process of its own"
    if reason is not None:
        raise ValueError(_refused(reason))


def _weights(dtype: str) -> str:
    return f"chooses for weights in float32, and these are in {dtype}: set model.policy.dtype float32"


def _refused(reason: str) -> str:
    return f"model.compute: auto {reason}, or model.compute exact."


def measure(
    policy: PreTrainedModel,
    sampler: CompletionSampler,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: SamplingParams,
    most_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Measured:
    """Draws and trains on the same few tokens in both types, in turn, and leaves the policy as it is.

    A step is taken to draw completions of the full length, and to train on these and their prompts.

    Args:
        most_tokens: of a forward and backward pass.

    Raises:
        RolloutInterrupted: ``should_stop`` turned true.
    """
    full, drawn = sampling.max_completion_length, min(DRAWN, sampling.max_completion_length)
    temperature, sampling = sampling.temperature, replace(sampling, max_completion_length=drawn)
    draw = partial(sampler.sample, policy, sampling=sampling, seed=0, split="train", should_stop=should_stop)
    prompt = max(map(len, sampler.prompt_ids(policy, problems, drawn)))
    work = MOST_WORK / (6 * sum(weight.numel() for weight in policy.parameters()))
    rows = max(1, int(min(MOST_TOKENS, most_tokens or MOST_TOKENS, work) / (prompt + drawn)))
    prompts, group = problems[: max(1, rows // group_size)], min(rows, group_size)
    tried = was_tried(policy)
    drawing, training = (dict.fromkeys(_CONTEXTS, float("inf")) for _ in range(2))
    rollouts: dict[str, Rollout] = {}
    for _ in range(ROUNDS):
        for name, context in _CONTEXTS.items():
            with context():
                start = time.perf_counter()
                rollouts[name] = draw(prompts, group_size=group).rollout
                between = time.perf_counter()
                _scored(policy, rollouts[name], temperature).sum().backward()
                training[name] = min(training[name], time.perf_counter() - between)
                drawing[name] = min(drawing[name], between - start)
            policy.zero_grad(set_to_none=True)
    step = {
        name: drawing[name] * full / drawn + training[name] * (prompt + full) / (prompt + drawn) for name in _CONTEXTS
    }
    with torch.no_grad(), _CONTEXTS["bfloat16"]():
        rounded = rollouts["bfloat16"]
        apart = (_scored(policy, rounded, temperature) - rounded.sampling_logprobs)[rounded.completion_mask].abs()
    if not tried:
        forget_forward_mode(policy)  # a resumed run, which does not measure, tries it in its own precision as well
    return Measured(
        gain=step["float32"] / step["bfloat16"],
        mean_error=float(apart.mean()),
        p99_error=float(apart.quantile(0.99)),
        equal_rows=_equal_rows(rollouts["float32"], rounded),
    )


def _equal_rows(one: Rollout, other: Rollout) -> float:
    width = min(one.completion_ids.shape[1], other.completion_ids.shape[1])
    same = (one.completion_ids[:, :width] == other.completion_ids[:, :width]).all(dim=1)
    return float((same & (one.lengths == other.lengths)).float().mean())


def _scored(policy: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    parts = rollout_rows(rollout, torch.arange(len(rollout.completion_ids)))
    return completion_logprobs(policy, **parts, temperature=temperature, with_entropy=False)[0]
