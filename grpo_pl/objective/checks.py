"""Refuses objectives whose choices contradict each other, each with a sentence that says what to change."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Literal, get_origin, get_type_hints

from grpo_pl.functional.choices import check_choice
from grpo_pl.objective.fields import Objective


def check_objective(objective: Objective) -> None:
    """Raises ``ValueError`` for the first thing that is wrong with ``objective``."""
    _check_choices(objective)
    _check_ranges(objective)
    for wrong, advice in (*_advantage_rules(objective), *_loss_rules(objective)):
        if wrong:
            raise ValueError(advice)


def _check_choices(a: Objective) -> None:
    """The command line checks ``Literal`` fields by itself; code that builds the dataclass relies on this."""
    hints = get_type_hints(type(a))
    for field in fields(a):
        if get_origin(hints[field.name]) is Literal:
            check_choice(field.name, getattr(a, field.name), hints[field.name])


def _check_ranges(a: Objective) -> None:
    for name in ("group_size", "num_iterations", "num_minibatches"):
        if getattr(a, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(a, name)}.")
    if a.max_resample_attempts < 0:
        raise ValueError(f"max_resample_attempts must be 0 or more, got {a.max_resample_attempts}.")
    for name in ("beta", "epsilon_low", "epsilon_high", "std_eps", "entropy_coef", "mismatch_min"):
        if not 0 <= getattr(a, name) < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {getattr(a, name)}.")
    for name in ("cispo_cap", "sapo_temperature_positive", "sapo_temperature_negative"):
        if not 0 < getattr(a, name) < math.inf:
            raise ValueError(f"{name} must be finite and above 0, got {getattr(a, name)}.")
    if not 0 < a.top_entropy_quantile <= 1:
        raise ValueError(f"top_entropy_quantile must lie in (0, 1], 1 being off, got {a.top_entropy_quantile}.")
    if not 0 <= a.overlong_buffer <= 1:
        raise ValueError(f"overlong_buffer must lie in [0, 1], 0 being off, got {a.overlong_buffer}.")
    if not a.mismatch_min < a.mismatch_max < math.inf:
        raise ValueError(f"mismatch_max must be finite and above mismatch_min {a.mismatch_min}, got {a.mismatch_max}.")
    if a.epsilon_low > 1 and a.ratio_level != "geometric":
        raise ValueError(f"epsilon_low must be at most 1 (a ratio is never negative), got {a.epsilon_low}.")


def _advantage_rules(a: Objective) -> tuple[tuple[bool, str], ...]:
    alone = a.group_size == 1
    return (
        (
            alone and a.baseline in ("group_mean", "leave_one_out"),
            f"baseline {a.baseline} needs other completions of the same prompt: set group_size to 2 or more, "
            "or choose baseline batch_mean, greedy or none.",
        ),
        (
            alone and a.scale == "group_std",
            "scale group_std needs a group: set group_size to 2 or more, or choose another scale.",
        ),
        (
            alone and a.dynamic_sampling,
            "dynamic_sampling looks for groups with different rewards: set group_size to 2 or more.",
        ),
        (
            a.scale == "group_std" and a.baseline not in ("group_mean", "leave_one_out"),
            f"scale group_std would divide by 0 where a group's rewards are equal and baseline {a.baseline} is not: "
            "set baseline group_mean or leave_one_out, or another scale.",
        ),
        (
            a.scale == "batch_std" and a.baseline in ("greedy", "none"),
            f"scale batch_std would divide by 0 where all rewards are equal and baseline {a.baseline} is not: set a "
            "baseline of means, or scale token_whitening or none.",
        ),
        (
            a.max_rewards and (a.baseline != "none" or a.scale != "none"),
            f"max_rewards keeps rewards as they are: set baseline none and scale none, not {a.baseline} and {a.scale}.",
        ),
        (
            a.reward_aggregation == "normalize_then_sum" and (a.baseline != "group_mean" or a.scale != "group_std"),
            "reward_aggregation normalize_then_sum normalises each reward inside its group: set baseline group_mean "
            "and scale group_std.",
        ),
        (
            a.reward_aggregation == "normalize_then_sum"
            and (a.overlong_buffer > 0 or (a.beta > 0 and a.kl_placement == "reward")),
            "reward_aggregation normalize_then_sum has no summed reward to add a penalty to: set overlong_buffer 0 "
            "and kl_placement loss, or sum_then_normalize.",
        ),
        *_process_rules(a),
    )


def _process_rules(a: Objective) -> tuple[tuple[bool, str], ...]:
    process = a.supervision == "process"
    return (
        (
            process and (a.baseline != "group_mean" or a.scale not in ("group_std", "none")),
            "supervision process normalises over the steps of a group: set baseline group_mean and scale group_std "
            f"or none, not {a.baseline} and {a.scale}.",
        ),
        (
            process and (a.overlong_buffer > 0 or (a.beta > 0 and a.kl_placement == "reward")),
            "supervision process takes rewards of steps, which have no overlong penalty or KL: set overlong_buffer 0 "
            "and kl_placement loss.",
        ),
        (
            process and a.reward_aggregation == "normalize_then_sum",
            "supervision process has one reward per step: set reward_aggregation sum_then_normalize.",
        ),
        (
            process and a.dynamic_sampling,
            "dynamic_sampling compares outcome rewards, while supervision process learns from steps: set it to false.",
        ),
        (
            process and a.ratio_level == "geometric",
            "ratio_level geometric has one objective per completion, supervision process one advantage per token: "
            "set ratio_level token or sequence.",
        ),
    )


def _loss_rules(a: Objective) -> tuple[tuple[bool, str], ...]:
    return (
        (
            a.ratio_level == "geometric" and a.surrogate != "clip",
            f"ratio_level geometric has its own clipping: set surrogate clip, not {a.surrogate}.",
        ),
        (
            a.ratio_level == "sequence" and a.surrogate in ("reinforce", "nll"),
            f"surrogate {a.surrogate} uses no ratio: set ratio_level token.",
        ),
        (
            a.dual_clip is not None and (a.surrogate != "clip" or a.ratio_level == "geometric"),
            "dual_clip belongs to surrogate clip at ratio_level token or sequence: set it to null.",
        ),
        (
            a.dual_clip is not None and not 1 + a.epsilon_high < a.dual_clip < math.inf,
            f"dual_clip must be above 1 + epsilon_high = {1 + a.epsilon_high}, got {a.dual_clip}.",
        ),
        (
            a.surrogate == "nll" and a.samples != "correct",
            "surrogate nll imitates whatever it is given: set samples correct.",
        ),
        (
            a.surrogate == "nll" and (a.baseline != "none" or a.scale != "none" or a.supervision == "process"),
            "surrogate nll ignores advantages: set baseline none, scale none and supervision outcome.",
        ),
        (
            a.beta > 0 and a.kl_placement == "reward" and a.kl_estimator != "k1",
            f"kl_placement reward sums k1 over the completion: set kl_estimator k1, not {a.kl_estimator}.",
        ),
        (
            a.surrogate == "nll" and a.beta > 0 and a.kl_placement == "reward",
            "surrogate nll ignores rewards: set kl_placement loss, or beta 0.",
        ),
        (
            (a.reference == "refreshed") != (a.ref_update_every is not None),
            "reference refreshed and ref_update_every belong together: set both, or frozen and null.",
        ),
        (
            a.ref_update_every is not None and a.ref_update_every < 1,
            f"ref_update_every must be at least 1, got {a.ref_update_every}.",
        ),
    )
