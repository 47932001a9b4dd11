"""Terms of the objective in configurations: merged by name over overlays; fields of 0.3 that are terms now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from grpo_pl.processes.rank import is_first_process

OBJECTIVE = "model.algorithm"
"""Key of the objective in a configuration."""
TERMS = f"{OBJECTIVE}.terms"
"""Key of the terms in a configuration, a mapping of names to ``class_path`` and ``init_args``."""


ROOM = "grpo_pl.objective.terms"
"""Package of the shipped terms."""


@dataclass(frozen=True)
class Moved:
    """Fields of the objective in 0.3 that belong to one term now."""

    name: str
    """Of the term, where the fields of 0.3 stand for it."""
    class_path: str
    acts: Callable[[Mapping[str, Any]], bool]
    """True if the fields of 0.3, all of them, ask for the term."""
    decided_by: tuple[str, ...]
    """The fields that `acts` reads."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of 0.3 -> argument of the term."""
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of 0.3 that are no arguments, where there is the term."""


_DISTILLED = {
    "distillation": "divergence",
    "distillation_mix": "mix",
    "distillation_top_k": "top_k",
    "distillation_coef": "coef",
    "teacher_advantage": "advantage",
    "teacher_clip": "clip",
    "distillation_alone": "alone",
}


def _distils(old: Mapping[str, Any]) -> bool:
    return old["supervision"] == "token" or old["distillation"] != "none"


MOVED_FIELDS = (
    Moved(
        "anchor",
        f"{ROOM}.anchor.Anchor",
        lambda old: old["anchor_coef"] != 0,
        ("anchor_coef",),
        {"anchor_coef": "coef"},
    ),
    Moved(
        "entropy_target",
        f"{ROOM}.entropy_target.EntropyTarget",
        lambda old: old["entropy_target"] is not None,
        ("entropy_target",),
        {"entropy_target": "target", "entropy_coef_step": "coef_step", "entropy_coef_max": "coef_max"},
    ),
    Moved(
        "top_entropy",
        f"{ROOM}.top_entropy.TopEntropyTokens",
        lambda old: old["top_entropy_quantile"] != 1,
        ("top_entropy_quantile",),
        {"top_entropy_quantile": "quantile"},
    ),
    Moved(
        "covariance",
        f"{ROOM}.covariance.Covariance",
        lambda old: old["covariance"] != "none",
        ("covariance",),
        {
            "covariance": "kind",
            "covariance_share": "share",
            "covariance_min": "low",
            "covariance_max": "high",
            "covariance_kl_coef": "kl_coef",
        },
    ),
    Moved(
        "trust_region",
        f"{ROOM}.top_k_trust_region.TopKTrustRegion",
        lambda old: old["trust_region_top_k"] != 0,
        ("trust_region_top_k",),
        {"trust_region_top_k": "top_k"},
    ),
    Moved(
        "observations",
        f"{ROOM}.echo.ECHO",
        lambda old: old["observation_coef"] != 0,
        ("observation_coef",),
        {"observation_coef": "coef"},
    ),
    Moved(
        "demonstrations",
        f"{ROOM}.chord.CHORD",
        lambda old: old["demonstration_coef"] != 0,
        ("demonstration_coef",),
        {
            "demonstration_coef": "coef",
            "demonstration_coef_final": "coef_final",
            "demonstration_decay_rollouts": "decay_rollouts",
            "demonstration_weighting": "weighting",
        },
    ),
    Moved(
        "process",
        f"{ROOM}.process.ProcessSupervision",
        lambda old: old["supervision"] == "process",
        ("supervision",),
        implies={"supervision": "process"},
    ),
    Moved(
        "turn_returns",
        f"{ROOM}.turn_returns.TurnReturns",
        lambda old: old["supervision"] == "turn" and old["turn_advantage"] == "returns",
        ("supervision", "turn_advantage"),
        {"gamma": "gamma", "state_similarity": "state_similarity"},
        implies={"supervision": "turn"},
    ),
    Moved(
        "gigpo",
        f"{ROOM}.gigpo.GiGPO",
        lambda old: old["supervision"] == "turn" and old["turn_advantage"] == "gigpo",
        ("supervision", "turn_advantage"),
        {
            "gamma": "gamma",
            "state_similarity": "state_similarity",
            "step_weight": "step_weight",
            "episode_statistics": "episode_statistics",
            "invalid_action_penalty": "invalid_action_penalty",
        },
        implies={"supervision": "turn", "turn_advantage": "gigpo"},
    ),
    Moved(
        "distillation",
        f"{ROOM}.distillation.Distillation",
        lambda old: _distils(old) and old["teacher_weights"] == "model",
        ("supervision", "distillation", "teacher_weights"),
        _DISTILLED,
    ),
    Moved(
        "self_distillation",
        f"{ROOM}.self_distillation.SelfDistillation",
        lambda old: _distils(old) and old["teacher_weights"] != "model",
        ("supervision", "distillation", "teacher_weights"),
        {**_DISTILLED, "teacher_weights": "weights", "teacher_rate": "rate"},
    ),
)
"""In the order in which 0.3 came to them."""
_DEFAULTS: dict[str, Any] = {
    "supervision": "outcome",
    "turn_advantage": "returns",
    "gamma": 1.0,
    "state_similarity": None,
    "step_weight": 1.0,
    "episode_statistics": "episodes",
    "invalid_action_penalty": 0.0,
    "anchor_coef": 0.0,
    "entropy_target": None,
    "entropy_coef_step": 0.005,
    "entropy_coef_max": 1.0,
    "top_entropy_quantile": 1.0,
    "covariance": "none",
    "covariance_share": 2e-4,
    "covariance_min": 1.0,
    "covariance_max": 5.0,
    "covariance_kl_coef": 1.0,
    "trust_region_top_k": 0,
    "observation_coef": 0.0,
    "demonstration_coef": 0.0,
    "demonstration_coef_final": 0.0,
    "demonstration_decay_rollouts": 0,
    "demonstration_weighting": "equal",
    "distillation": "none",
    "distillation_mix": 0.5,
    "distillation_top_k": 0,
    "distillation_coef": 1.0,
    "distillation_alone": False,
    "teacher_weights": "model",
    "teacher_rate": 0.05,
    "teacher_advantage": "add",
    "teacher_clip": 0.2,
}
"""Fields of the objective in 0.3 that are terms now, or parts of one, with their values there."""
_CHOICES = {
    "supervision": ("outcome", "process", "turn", "token"),
    "turn_advantage": ("returns", "gigpo"),
    "distillation": ("none", "forward_kl", "reverse_kl", "jensen_shannon"),
    "teacher_weights": ("model", "start", "live", "average"),
}
"""Values of fields that decide which term there is."""
EARLIER = frozenset(_DEFAULTS)
"""Names of the fields of the objective in 0.3 that are terms now, or parts of one."""


def merged_terms(before: Mapping[str, Any], given: Mapping[str, Any], *, drop: bool = True) -> dict[str, Any]:
    """``given`` over ``before``, name by name: null removes a term, or with ``drop`` false stays to remove one of an
    earlier file; the same or no class keeps what is not given."""
    merged: dict[str, Any] = dict(before)
    for name, term in given.items():
        old: Any = merged.get(name)
        new: Any = {"class_path": term} if isinstance(term, str) else term
        both = isinstance(new, Mapping) and isinstance(old, Mapping)
        if both and new.get("class_path") in (None, old["class_path"]):
            arguments = {**(old.get("init_args") or {}), **(new.get("init_args") or {})}
            new = {**new, "class_path": old["class_path"], "init_args": arguments}
        if new is None and drop:
            merged.pop(name, None)
        else:
            merged[name] = new
    return merged


def with_nested_terms(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """``tree`` with keys such as ``model.algorithm.terms`` written out as mappings, together with those beside them.

    Args:
        key: where in a configuration the tree stands, such as ``model``.
    """
    dotted = {name for name in tree if "." in name and f"{key}.{name}".lstrip(".").startswith(f"{OBJECTIVE}.")}
    parts = {name.partition(".")[0] for name in dotted}
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        path = name.split(".") if name.partition(".")[0] in parts else [name]
        for part in reversed(path):
            value = {part: value}
        nested = _joined(nested, value)
    return nested


def _joined(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Both, mapping by mapping; where they differ, the second."""
    joined = dict(one)
    for name, value in two.items():
        both = isinstance(value, Mapping) and isinstance(joined.get(name), Mapping)
        joined[name] = _joined(joined[name], value) if both else value
    return joined


def with_terms_of_fields(
    objective: Mapping[str, Any],
    key: str = "",
    before: Mapping[str, Any] | None = None,
    waiting: dict[str, Any] | None = None,
    own: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of an objective with those of 0.3 as terms; each that acts is told once, with its place now.

    Args:
        key: where the fields stand, for the line that tells; none tells nothing.
        before: the terms that the fields are set over, as a configuration holds them.
        waiting: fields of 0.3 in earlier files and options that no term has taken; brought up to date.
        own: fields of the objective's class, which stay whatever they meant in 0.3.

    Raises:
        ValueError: a choice that 0.3 did not have, or two ways of asking a teacher.
    """
    kept, terms = dict(objective), dict[str, Any]()
    given = {name: kept.pop(name) for name in EARLIER.difference(own) if name in kept}
    if not given:
        return kept
    waiting = {} if waiting is None else waiting
    there = merged_terms(before or {}, kept.get("terms") or {})
    known = waiting | _earlier_fields(there) | given
    _check_choices(_DEFAULTS | known, key or OBJECTIVE)
    taken = set[str]()
    for moved in MOVED_FIELDS:
        touched = given.keys() & {*moved.fields, *moved.decided_by}
        acts = moved.acts(_DEFAULTS | known)
        arguments = {name: known[old] for old, name in moved.fields.items() if old in known}
        if acts:
            taken |= {*moved.fields, *moved.decided_by}
        if not touched:
            continue
        name = _name_of(moved, there)
        terms[name] = {"class_path": moved.class_path, "init_args": arguments} if acts else None
        if acts and key:
            _tell(
                f"{', '.join(f'{key}.{old}' for old in sorted(touched))}: that is {TERMS}.{name} now: class_path "
                f"{moved.class_path}, init_args {arguments}. Version 0.5 will not read the old fields."
            )
    for old in sorted(given.keys() - taken):
        if key and given[old] != _DEFAULTS[old]:
            _tell(f"{key}.{old} is {given[old]!r}, and no term takes it so far: it has no effect by itself.")
    left = {old: value for old, value in known.items() if old not in taken}
    waiting.clear()
    waiting.update(left)
    return {**kept, "terms": merged_terms(terms, kept.get("terms") or {}, drop=False)}


def _check_choices(known: Mapping[str, Any], key: str) -> None:
    for name, choices in _CHOICES.items():
        if known[name] not in choices:
            raise ValueError(f"{key}.{name} is {known[name]!r}: choose one of {', '.join(choices)}.")
    if known["supervision"] == "token" and known["distillation"] != "none":
        raise ValueError(
            f"{key}.supervision token and distillation {known['distillation']} would ask the teacher twice: choose one."
        )


def _name_of(moved: Moved, terms: Mapping[str, Any]) -> str:
    """The name under which there is such a term, or else the one that fields of 0.3 give it."""
    for name, term in terms.items():
        if isinstance(term, Mapping) and term.get("class_path") == moved.class_path:
            return name
    return moved.name


def _earlier_fields(terms: Mapping[str, Any]) -> dict[str, Any]:
    """What 0.3 would have said for ``terms``."""
    found: dict[str, Any] = {}
    for moved in MOVED_FIELDS:
        term = terms.get(_name_of(moved, terms))
        if not isinstance(term, Mapping) or term.get("class_path") != moved.class_path:
            continue
        arguments = term.get("init_args") or {}
        said = {old: arguments[name] for old, name in moved.fields.items() if name in arguments}
        found |= {**moved.implies, **said}
        if moved.fields.get("distillation") and found.get("distillation", "none") == "none":
            found["supervision"] = "token"
    return found


@cache
def _tell(line: str) -> None:
    if is_first_process():
        print(line, file=sys.stderr)
