"""Terms of the objective in configurations: merged by name over overlays; fields of 0.3 that are terms now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

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
    "anchor_coef": 0.0,
    "entropy_target": None,
    "top_entropy_quantile": 1.0,
    "covariance": "none",
    "trust_region_top_k": 0,
    "observation_coef": 0.0,
    "demonstration_coef": 0.0,
    "distillation": "none",
    "teacher_weights": "model",
}
"""Of the fields that decide, in 0.3."""
EARLIER = frozenset(_DEFAULTS) | {name for moved in MOVED_FIELDS for name in moved.fields}
"""Fields of the objective in 0.3 that are terms now, or parts of one."""


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
    """``tree`` with keys such as ``model.algorithm.terms``, or a field of 0.3 that is a term now, written out as
    mappings.

    Args:
        key: where in a configuration the tree stands, such as ``model``.
    """
    fields = {f"{OBJECTIVE}.{name}" for name in EARLIER}
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{key}.{name}".lstrip(".")
        *parents, last = name.split(".") if path in fields or f"{path}.".startswith(f"{TERMS}.") else [name]
        inner = nested
        for parent in parents:
            inner[parent] = dict(inner.get(parent) or {})
            inner = inner[parent]
        both = isinstance(value, Mapping) and isinstance(inner.get(last), Mapping)
        inner[last] = {**inner[last], **value} if both else value
    return nested


def with_terms_of_fields(
    objective: Mapping[str, Any], key: str = "", before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of an objective with those of 0.3 as terms; each that acts is told once, with its place now.

    Args:
        key: where the fields stand, for the line that tells; none tells nothing.
        before: the terms that the fields are set over, as a configuration holds them.
    """
    kept, terms = dict(objective), dict[str, Any]()
    given = {name: kept.pop(name) for name in EARLIER if name in kept}
    known = _earlier_fields(merged_terms(before or {}, kept.get("terms") or {})) | given
    for moved in MOVED_FIELDS:
        if not given.keys() & {*moved.fields, *moved.decided_by}:
            continue
        acts = moved.acts(_DEFAULTS | known)
        arguments = {name: known[old] for old, name in moved.fields.items() if old in known}
        terms[moved.name] = {"class_path": moved.class_path, "init_args": arguments} if acts else None
        if acts and key:
            old = ", ".join(f"{key}.{name}" for name in sorted(given.keys() & {*moved.fields, *moved.decided_by}))
            _tell(
                f"{old}: that is {TERMS}.{moved.name} now: class_path {moved.class_path}, init_args {arguments}. "
                "Version 0.5 will not read the old fields."
            )
    return {**kept, "terms": merged_terms(terms, kept.get("terms") or {}, drop=False)} if given else kept


def _earlier_fields(terms: Mapping[str, Any]) -> dict[str, Any]:
    """What 0.3 would have said for ``terms``."""
    found: dict[str, Any] = {}
    for moved in MOVED_FIELDS:
        term = terms.get(moved.name)
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
    print(line, file=sys.stderr)
