"""Refuses objectives whose fields contradict each other; each message says what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.objective.fields import BUDGET, WITHOUT_RATIO, Objective
from grpo_pl.objective.terms.base import Term
from grpo_pl.objective.terms.hooks import call


def check_objective(objective: Objective) -> None:
    """Raises ``ValueError`` for the first thing that is wrong with ``objective``."""
    _check_choices(objective)
    _check_ranges(objective)
    for rules in RULES:
        for advice in rules(objective):
            raise ValueError(advice)
    if not isinstance(objective.terms, Mapping):
        raise ValueError(f"terms must be a mapping of names to class_path and init_args, got {objective.terms}.")
    for name, term in objective.active_terms.items():
        if not isinstance(term, Term):
            raise ValueError(f"terms.{name} is {term!r}: give an object of a class of Term, such as Anchor(coef=0.1).")
    kinds = [type(term) for term in objective.active_terms.values()]
    if Term in kinds:
        raise ValueError("terms: an entry has no class_path that says which term is meant.")
    if twice := next((kind.__name__ for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"terms: two are of the class {twice}: leave out one of them.")
    credits = [type(term).__name__ for term in objective.active_terms.values() if term.overrides("credit")]
    if len(credits) > 1:
        raise ValueError(f"terms: {' and '.join(credits)} would each make the advantages: leave out all but one.")
    for name, term in objective.active_terms.items():
        call(name, term, "check", objective)
    _ = objective.needs  # raises where two terms contradict each other


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
    "must be 0 or more": (lambda x: x >= 0, ("max_resample_attempts",)),
    "must be finite and not negative": (
        lambda x: 0 <= x < math.inf,
        (
            *("beta", "epsilon_low", "epsilon_high", "std_eps", "entropy_coef", "mismatch_min"),
            *("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative"),
        ),
    ),
    "must be finite and above 0": (
        lambda x: 0 < x < math.inf,
        ("cispo_cap", "sapo_temperature_positive", "sapo_temperature_negative"),
    ),
    "must be finite and above 0, or null": (lambda x: 0 < x < math.inf, ("off_policy_mask",)),
    "must lie in [0, 1], 0 being off": (lambda x: 0 <= x <= 1, ("overlong_buffer",)),
}
"""What each number must be; null is off where a field may be null."""


def _check_ranges(a: Objective) -> None:
    for told, (holds, names) in _RANGES.items():
        for name in names:
            value = getattr(a, name)
            if not (value is None and "null" in told) and not holds(value):
                raise ValueError(f"{name} {told}, got {value}.")
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
        if a.overlong_buffer > 0 or a.kl_in_reward:
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
        if a.overlong_buffer > 0 or a.kl_in_reward:
            yield (
                "reward_aggregation normalize_then_sum has no summed reward to add a penalty to: set overlong_buffer 0 "
                "and kl_placement loss, or sum_then_normalize."
            )


def _ratio_rules(a: Objective) -> Rules:
    if a.ratio_level == "geometric" and a.surrogate != "clip":
        yield f"ratio_level geometric has its own clipping: set surrogate clip, not {_name(a.surrogate)}."
    if a.mismatch == "in_ratio" and a.surrogate in WITHOUT_RATIO:
        yield f"surrogate {a.surrogate} uses no ratio for mismatch in_ratio to correct: set mismatch auto."
    if a.bounds_divergence:
        if a.ratio_level != "token":
            yield f"surrogate {a.surrogate} bounds the divergence at each token: set ratio_level token."
        if a.mismatch not in ("auto", "none"):
            yield (
                f"surrogate {a.surrogate} takes the ratio to the policy that drew the tokens, which mismatch "
                f"{a.mismatch} would correct for once more: set mismatch none."
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
        if a.baseline != "none" or a.scale != "none":
            yield "surrogate nll ignores advantages: set baseline none and scale none."
    if a.kl_in_reward and a.kl_estimator != "k1":
        yield f"kl_placement reward sums k1 over the completion: set kl_estimator k1, not {a.kl_estimator}."
    if a.surrogate == "nll" and a.kl_in_reward:
        yield "surrogate nll ignores rewards: set kl_placement loss, or beta 0."
    if (a.reference == "refreshed") != (a.ref_update_every is not None):
        yield "reference refreshed and ref_update_every belong together: set both, or frozen and null."
    if a.ref_update_every is not None and a.ref_update_every < 1:
        yield f"ref_update_every must be at least 1, got {a.ref_update_every}."


RULES = (_group_rules, _advantage_rules, _ratio_rules, _loss_rules)
