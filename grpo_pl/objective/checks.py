"""Refuses objectives whose fields contradict each other; each message says what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.objective.fields import BUDGET, WITHOUT_RATIO, Objective
from grpo_pl.objective.terms.base import Term


def check_objective(objective: Objective) -> None:
    """Raises ``ValueError`` for the first thing that is wrong with ``objective``."""
    _check_choices(objective)
    _check_ranges(objective)
    for rules in RULES:
        for advice in rules(objective):
            raise ValueError(advice)
    if not isinstance(objective.terms, Mapping):
        raise ValueError(f"terms must be a mapping of names to class_path and init_args, got {objective.terms}.")
    kinds = [type(term) for term in objective.active_terms.values()]
    if Term in kinds:
        raise ValueError("terms: an entry has no class_path that says which term is meant.")
    if twice := next((kind.__name__ for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"terms: two are of the class {twice}: leave out one of them.")
    for term in objective.active_terms.values():
        term.check(objective)


def _check_choices(a: Objective) -> None:
    """The command line checks ``Literal`` fields by itself; code that builds the dataclass relies on this."""
    hints = get_type_hints(type(a))
    for field in fields(a):
        value, hint = getattr(a, field.name), hints[field.name]
        parts = (hint, *get_args(hint))
        choices = next((part for part in parts if get_origin(part) is Literal), None)
        classes = tuple(part for part in parts if isinstance(part, type))
        if choices is not None and not isinstance(value, classes):
            check_choice(field.name, value, choices, classes)


_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "must be at least 1": (lambda x: x >= 1, BUDGET),
    "must be 0 (off) or more": (lambda x: x >= 0, ("trust_region_top_k",)),
    "must be 0 or more": (lambda x: x >= 0, ("max_resample_attempts", "demonstration_decay_rollouts")),
    "must be 0 (off) or 2 or more, since one token alone has probability 1": (
        lambda x: x == 0 or x >= 2,
        ("distillation_top_k",),
    ),
    "must be finite and not negative": (
        lambda x: 0 <= x < math.inf,
        (
            *("beta", "epsilon_low", "epsilon_high", "std_eps", "entropy_coef", "covariance_kl_coef", "mismatch_min"),
            *("distillation_coef", "observation_coef", "entropy_coef_step", "entropy_coef_max"),
            *("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative"),
            *("step_weight", "invalid_action_penalty"),
        ),
    ),
    "must be finite and above 0": (
        lambda x: 0 < x < math.inf,
        ("cispo_cap", "sapo_temperature_positive", "sapo_temperature_negative"),
    ),
    "must be finite and above 0, or null": (lambda x: 0 < x < math.inf, ("entropy_target", "off_policy_mask")),
    "must lie in [0, 1], 1 being no discount": (lambda x: 0 <= x <= 1, ("gamma",)),
    "must lie in [0, 1], 0 being off": (lambda x: 0 <= x <= 1, ("overlong_buffer",)),
    "is a share of the loss, in [0, 1]": (lambda x: 0 <= x <= 1, ("demonstration_coef", "demonstration_coef_final")),
    "must lie in (0, 1] or be null": (lambda x: 0 < x <= 1, ("state_similarity",)),
    "must lie in (0, 1], 1 being off": (lambda x: 0 < x <= 1, ("top_entropy_quantile",)),
    "must lie in (0, 1], 1 being a copy": (lambda x: 0 < x <= 1, ("teacher_rate",)),
    "must lie in (0, 1]": (lambda x: 0 < x <= 1, ("covariance_share",)),
    "must lie in (0, 1), whose ends are forward_kl and reverse_kl": (lambda x: 0 < x < 1, ("distillation_mix",)),
    "must lie in [0, 1)": (lambda x: 0 <= x < 1, ("teacher_clip",)),
}
"""What each number must be; null is off where a field may be null."""


def _check_ranges(a: Objective) -> None:
    for told, (holds, names) in _RANGES.items():
        for name in names:
            value = getattr(a, name)
            if not (value is None and "null" in told) and not holds(value):
                raise ValueError(f"{name} {told}, got {value}.")
    step, first, most = a.entropy_coef_step, a.entropy_coef, a.entropy_coef_max
    if a.entropy_target is not None and not (0 < step <= most and first <= most):
        raise ValueError(
            f"entropy_target moves the weight by entropy_coef_step={step} from entropy_coef={first}: the first must be "
            f"above 0, and both at most entropy_coef_max={most}."
        )
    if not -math.inf < a.covariance_min < a.covariance_max:
        raise ValueError(
            f"covariance_max must be above covariance_min, a finite number, got {a.covariance_min} and "
            f"{a.covariance_max}."
        )
    if not a.mismatch_min < a.mismatch_max < math.inf:
        raise ValueError(f"mismatch_max must be finite and above mismatch_min {a.mismatch_min}, got {a.mismatch_max}.")
    if a.epsilon_low > 1 and a.ratio_level != "geometric" and a.surrogate != "dppo_kl":
        raise ValueError(f"epsilon_low must be at most 1 (a ratio is never negative), got {a.epsilon_low}.")


Rules = Iterator[str]
"""One advice for each contradiction."""


def _name(choice: object) -> str:
    """The name of a choice in messages: a string, or the class of a user's object."""
    return choice if isinstance(choice, str) else type(choice).__name__


def _group_rules(a: Objective) -> Rules:
    if a.group_size > 1:
        return
    if a.baseline in ("group_mean", "leave_one_out"):
        yield (
            f"baseline {a.baseline} needs other completions of the same prompt: set group_size to 2 or more, or choose "
            "baseline batch_mean, greedy or none."
        )
    if a.scale == "group_std":
        yield "scale group_std needs a group: set group_size to 2 or more, or choose another scale."
    if a.dynamic_sampling:
        yield "dynamic_sampling looks for groups with different rewards: set group_size to 2 or more."


def _advantage_rules(a: Objective) -> Rules:
    baseline = _name(a.baseline)
    if a.scale == "group_std" and baseline not in ("group_mean", "leave_one_out"):
        yield (
            f"scale group_std would divide by 0 where a group's rewards are equal and baseline {baseline} is not: "
            "set baseline group_mean or leave_one_out, or another scale."
        )
    if a.scale == "group_mean":
        if baseline not in ("group_mean", "none"):
            yield f"scale group_mean divides r - mean or r: set baseline group_mean or none, not {baseline}."
        if a.overlong_buffer > 0 or a.needs_sequence_kl:
            yield (
                "scale group_mean takes rewards of 0 and 1, which have no overlong penalty or KL: set overlong_buffer "
                "0 and kl_placement loss."
            )
    if a.scale == "batch_std" and baseline not in ("group_mean", "leave_one_out", "batch_mean"):
        yield (
            f"scale batch_std would divide by 0 where all rewards are equal and baseline {baseline} is not: set a "
            "baseline of means, or scale token_whitening or none."
        )
    if a.max_rewards and (baseline, a.scale) != ("none", "none"):
        yield f"max_rewards keeps rewards as they are: set baseline none and scale none, not {baseline} and {a.scale}."
    if a.reward_aggregation == "normalize_then_sum":
        if (baseline, a.scale) != ("group_mean", "group_std"):
            yield (
                "reward_aggregation normalize_then_sum normalises each reward inside its group: set baseline "
                "group_mean and scale group_std."
            )
        if a.overlong_buffer > 0 or a.needs_sequence_kl:
            yield (
                "reward_aggregation normalize_then_sum has no summed reward to add a penalty to: set overlong_buffer 0 "
                "and kl_placement loss, or sum_then_normalize."
            )


def _process_rules(a: Objective) -> Rules:
    if a.supervision != "process":
        return
    if a.baseline != "group_mean" or a.scale not in ("group_std", "none"):
        yield (
            "supervision process normalises over the steps of a group: set baseline group_mean and scale group_std "
            f"or none, not {_name(a.baseline)} and {a.scale}."
        )
    if a.dynamic_sampling:
        yield "dynamic_sampling compares outcome rewards, while supervision process learns from steps: set it to false."


def _turn_rules(a: Objective) -> Rules:
    if a.supervision != "turn":
        return
    baseline, own = _name(a.baseline), ("group_mean", "leave_one_out")
    if a.turn_advantage == "returns" and (baseline not in own or a.scale != "none"):
        yield (
            "turn_advantage returns subtracts what other episodes got from the same state: set baseline leave_one_out "
            f"or group_mean and scale none, not {baseline} and {a.scale}."
        )
    if a.turn_advantage == "returns" and a.invalid_action_penalty > 0:
        yield "invalid_action_penalty belongs to turn_advantage gigpo: set it to 0."
    if a.turn_advantage == "gigpo":
        if baseline != "group_mean" or a.scale not in ("none", "group_std"):
            yield (
                "turn_advantage gigpo compares with the mean of the group: set baseline group_mean and scale none or "
                f"group_std, not {baseline} and {a.scale}."
            )
        if a.scale == "group_std" and a.std_ddof != 1:
            yield "turn_advantage gigpo divides by the sample's standard deviation: set std_ddof 1, or scale none."


def _teacher_rules(a: Objective) -> Rules:
    """Contradictions of a teacher with other fields, beside rewards and without them."""
    if a.distillation_alone and not a.needs_teacher:
        yield "distillation_alone learns from a teacher: set supervision token, or distillation to a divergence."
    if a.distillation_top_k > 0 and not a.needs_divergence:
        yield "distillation_top_k belongs to the divergence of distillation, which is none: set it to 0."
    if a.needs_teacher and a.distillation_coef == 0:
        yield "distillation_coef is 0, so the teacher has no weight: set supervision outcome and distillation none."
    if a.teacher_weights != "model" and not a.needs_teacher:
        yield (
            f"teacher_weights {a.teacher_weights} is a teacher that nothing is learned from: set supervision token or "
            "distillation to a divergence, or teacher_weights model."
        )
    if a.teacher_advantage == "reweigh":
        if a.supervision != "token":
            yield f"teacher_advantage reweigh belongs to supervision token, not {a.supervision}: set one of the two."
        if a.distillation_alone:
            yield "teacher_advantage reweigh needs advantages of rewards: set distillation_alone false."
        if a.distillation_coef > 1:
            yield f"teacher_advantage reweigh takes distillation_coef as a share, at most 1, got {a.distillation_coef}."
    if a.supervision == "token":
        if a.needs_divergence:
            yield f"supervision token and distillation {a.distillation} would ask the teacher twice: choose one."
        if a.surrogate == "nll":
            yield "surrogate nll ignores advantages, the teacher's among them: set another surrogate."
        if a.ratio_level == "geometric":
            yield (
                "ratio_level geometric has one objective per completion, supervision token one advantage per token: "
                "set ratio_level token or sequence."
            )
        if a.needs_covariance:
            yield f"covariance {a.covariance} is that of rewards' advantages, not of a teacher's: set covariance none."
    if a.needs_observations and a.needs_divergence:
        yield (
            f"distillation {a.distillation} compares at the policy's tokens alone, and observation_coef asks for those "
            "of observations: set supervision token and distillation none, or observation_coef 0."
        )
    if not a.distillation_alone:
        return
    if _name(a.baseline) != "none" or a.scale != "none":
        yield "distillation_alone makes no advantages of rewards: set baseline none and scale none."
    if a.supervision in ("process", "turn"):
        yield f"distillation_alone has no use for supervision {a.supervision}: set supervision token or outcome."
    if a.overlong_buffer > 0 or a.needs_sequence_kl or a.max_rewards:
        yield (
            "distillation_alone leaves rewards alone: set overlong_buffer 0, max_rewards false, and kl_placement loss "
            "or beta 0."
        )
    if a.samples != "all" or a.dynamic_sampling:
        yield "distillation_alone takes every completion as it comes: set samples all and dynamic_sampling false."


def _part_rules(a: Objective) -> Rules:
    """Contradictions of rewards and advantages of parts of a completion."""
    if a.supervision in ("outcome", "token"):
        return
    part, advantage = ("step", "token") if a.supervision == "process" else ("turn", "turn")
    if a.overlong_buffer > 0 or a.needs_sequence_kl:
        yield (
            f"supervision {a.supervision} takes rewards of {part}s, which have no overlong penalty or KL: set "
            "overlong_buffer 0 and kl_placement loss."
        )
    if a.reward_aggregation == "normalize_then_sum":
        yield f"supervision {a.supervision} has one reward per {part}: set reward_aggregation sum_then_normalize."
    if a.ratio_level == "geometric":
        yield (
            f"ratio_level geometric has one objective per completion, supervision {a.supervision} one advantage per "
            f"{advantage}: set ratio_level token or sequence."
        )


def _ratio_rules(a: Objective) -> Rules:
    if a.ratio_level == "geometric" and a.surrogate != "clip":
        yield f"ratio_level geometric has its own clipping: set surrogate clip, not {_name(a.surrogate)}."
    if a.mismatch == "in_ratio" and a.surrogate in WITHOUT_RATIO:
        yield f"surrogate {a.surrogate} uses no ratio for mismatch in_ratio to correct: set mismatch truncate_token."
    if a.bounds_divergence:
        if a.ratio_level != "token":
            yield f"surrogate {a.surrogate} bounds the divergence at each token: set ratio_level token."
        if a.mismatch not in ("auto", "none"):
            yield (
                f"surrogate {a.surrogate} takes the ratio to the policy that drew the tokens, which mismatch "
                f"{a.mismatch} would correct for once more: set mismatch none."
            )
    elif a.trust_region_top_k > 0:
        yield (
            f"trust_region_top_k belongs to surrogate dppo_tv and dppo_kl, and surrogate is {_name(a.surrogate)}: set "
            "it to 0."
        )
    if a.surrogate == "vespo":
        if a.ratio_level != "token":
            yield "surrogate vespo takes the ratio of the whole completion by itself: set ratio_level token."
        if a.mismatch not in ("auto", "none", "in_ratio"):
            yield (
                f"surrogate vespo weighs by the ratio of the whole completion, and mismatch {a.mismatch} would weigh "
                "once more: set mismatch in_ratio."
            )
    if a.ratio_level == "sequence" and a.surrogate in WITHOUT_RATIO:
        yield f"surrogate {a.surrogate} uses no ratio: set ratio_level token."
    if a.dual_clip is not None:
        if a.surrogate != "clip" or a.ratio_level == "geometric":
            yield "dual_clip belongs to surrogate clip at ratio_level token or sequence: set it to null."
        if not 1 + a.epsilon_high < a.dual_clip < math.inf:
            yield f"dual_clip must be above 1 + epsilon_high = {1 + a.epsilon_high}, got {a.dual_clip}."


def _loss_rules(a: Objective) -> Rules:
    if a.surrogate == "nll":
        if a.samples != "correct":
            yield "surrogate nll imitates whatever it is given: set samples correct."
        if a.baseline != "none" or a.scale != "none" or a.supervision != "outcome":
            yield "surrogate nll ignores advantages: set baseline none, scale none and supervision outcome."
    if a.demonstration_coef_final > 0 and a.demonstration_decay_rollouts == 0:
        yield "demonstration_coef_final is the share after a decay: set demonstration_decay_rollouts, or it to 0."
    if a.demonstration_decay_rollouts > 0 and not a.needs_demonstrations:
        yield "demonstration_decay_rollouts lowers demonstration_coef, which is 0: set it above 0."
    if a.needs_sequence_kl and a.kl_estimator != "k1":
        yield f"kl_placement reward sums k1 over the completion: set kl_estimator k1, not {a.kl_estimator}."
    if a.surrogate == "nll" and a.needs_sequence_kl:
        yield "surrogate nll ignores rewards: set kl_placement loss, or beta 0."
    if (a.reference == "refreshed") != (a.ref_update_every is not None):
        yield "reference refreshed and ref_update_every belong together: set both, or frozen and null."
    if a.ref_update_every is not None and a.ref_update_every < 1:
        yield f"ref_update_every must be at least 1, got {a.ref_update_every}."


RULES = (
    *(_group_rules, _teacher_rules, _advantage_rules, _process_rules, _turn_rules, _part_rules, _ratio_rules),
    _loss_rules,
)
