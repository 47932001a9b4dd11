"""What of a run's parts cannot go together, each in one line that says what to set."""

from __future__ import annotations

import inspect

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rollout.copying import CopyEngine
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.types import SamplingParams


def check_parts(
    policy: PolicyConfig,
    algorithm: GRPOAlgorithm,
    sampling: SamplingParams,
    *,
    cold_start: ColdStart | None,
    in_one_go: bool,
    max_tokens_per_microbatch: int | None,
) -> None:
    """Refuses fields of a run that contradict each other.

    Args:
        in_one_go: completions are drawn in one turn and one step.

    Raises:
        ValueError: the first of them.
    """
    if sampling.sampling_mask and not in_one_go:
        raise ValueError(
            "model.sampling.sampling_mask is for completions drawn in one turn and one step: set model.environment "
            "and model.partial_rollouts null, or top_k 0 and top_p 1."
        )
    if algorithm.needs_likely and not in_one_go:
        raise ValueError(
            "model.algorithm.trust_region_top_k is for completions drawn in one turn and one step: set "
            "model.environment and model.partial_rollouts null, or it to 0."
        )
    if sampling.top_logprobs not in (0, algorithm.trust_region_top_k):
        raise ValueError(
            f"model.sampling.top_logprobs is {sampling.top_logprobs}, which the objective sets: set it to 0, and "
            "model.algorithm.trust_region_top_k where the objective shall use it."
        )
    if policy.quantization is not None and cold_start is not None:
        raise ValueError(
            "model.cold_start writes whole weights, which policy.quantization would round again: set one of them null."
        )
    if max_tokens_per_microbatch is not None and max_tokens_per_microbatch <= sampling.max_completion_length:
        raise ValueError(
            f"model.max_tokens_per_microbatch is {max_tokens_per_microbatch}, but must hold a prompt and a "
            f"completion of up to {sampling.max_completion_length} tokens (model.sampling.max_completion_length)."
        )


def check_engine(engine: RolloutEngine, algorithm: GRPOAlgorithm, sampling: SamplingParams, *, staleness: int) -> None:
    """Refuses an engine that takes no request, cannot record what the objective asks for, or cannot draw ahead.

    Raises:
        ValueError: the engine was written for an earlier version, keeps no support or no likely tokens, or reads the
            policy's weights while it draws, and they change.
    """
    name = type(engine).__name__
    try:
        inspect.signature(engine.generate).bind("model", "request", progress=None, should_stop=None)
    except TypeError as error:
        raise ValueError(
            f"model.engine: generate of {name} does not take (model, request, *, progress, should_stop): {error}. The "
            "arguments of earlier versions are fields of `request` now, see docs/engines.md."
        ) from None
    if sampling.sampling_mask and not engine.keeps_support:
        raise ValueError(
            f"model.sampling.sampling_mask needs an engine that notes what was left to draw from, and {name} does not: "
            "leave model.engine out, with data.staleness 0."
        )
    if algorithm.needs_likely and not engine.keeps_top:
        raise ValueError(
            f"model.algorithm.trust_region_top_k needs an engine that records the likeliest tokens, and {name} does "
            "not: leave model.engine out, or set it to 0."
        )
    if staleness > 0 and not isinstance(engine, CopyEngine):
        raise ValueError(
            f"data.staleness is {staleness}, and {name} reads the policy's weights while they change: set model.engine "
            "to NativeChildEngine, VLLMEngine or RemoteEngine, or leave it out."
        )
