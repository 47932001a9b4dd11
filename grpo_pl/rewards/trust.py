"""The rewards, prompt sources and environments that an export or run may name without ``--trust-rewards``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from grpo_pl import rewards
from grpo_pl.moved import defined_name

FLAG = "--trust-rewards"
SOURCES: Mapping[str, Sequence[str]] = {
    "tasks.arithmetic": ["ArithmeticPrompts"], "tasks.countdown": ["CountdownPrompts"],
    "curriculum": ["CurriculumPrompts"], "tasks.frozen_lake": ["FrozenLakePrompts"],
    "tasks.gsm_symbolic": ["GSMSymbolic"], "tasks.guess_number": ["GuessNumberPrompts"],
    "json_lines": ["JsonLinesPrompts"], "mixture": ["MixturePrompts"],
    "tasks.one_liners": ["OneLinerPrompts"], "tasks.reasoning_gym": ["ReasoningGymPrompts"],
    "tasks.shapes": ["ShapePrompts"], "tasks.sorting": ["SortingPrompts"], "tasks.subset_sum": ["SubsetSumPrompts"],
    "tasks.sums": ["SumPrompts"], "tasks.word_problems": ["WordProblems"], "tables": ["TablePrompts"],
}  # fmt: skip
"""Trusted prompt sources by module: they read data and import nothing by name."""
ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "gymnasium_ids": ["GymnasiumEnvironment"],
    "textarena_games": ["TextArenaEnvironment"],
    "tool_calls": ["HermesCalls", "TagCalls"],
    "tools": ["ToolEnvironment"],
}
"""Trusted environments by module, and what they are made of; `ENVIRONMENT_FUNCTIONS` says what these may call."""
TERMS: Mapping[str, Sequence[str]] = {
    "anchor": ["Anchor"], "chord": ["CHORD"], "covariance": ["Covariance"], "distillation": ["Distillation"],
    "echo": ["ECHO"], "entropy_target": ["EntropyTarget"], "gigpo": ["GiGPO"], "process": ["ProcessSupervision"],
    "self_distillation": ["SelfDistillation"], "top_entropy": ["TopEntropyTokens"],
    "top_k_trust_region": ["TopKTrustRegion"], "turn_returns": ["TurnReturns"],
}  # fmt: skip
"""Terms of the objective by module: their arguments are numbers and words."""
_FUNCTIONS = (
    "calculator:calc",
    "frozen_lake:parse",
    "frozen_lake:show",
    "frozen_lake:show_with_sides",
    "guess_number:show",
)
ENVIRONMENT_FUNCTIONS = frozenset(f"grpo_pl.extras.agents.{name}" for name in _FUNCTIONS)
"""Functions that a trusted environment may name, in the one form in which they may be written."""
_CALLED = ("observe", "parse", "tools")
LIMITS = {"workers": 64, "memory_limit_mb": 65_536, "soft_limit_s": 60, "hard_limit_s": 120, "max_answer_chars": 10**6}
"""Largest values, without the flag, of arguments that cost processes, memory or time."""
_LEVELS = 16


@cache
def trusted_rewards() -> frozenset[str]:
    """Dotted names of the rewards of `grpo_pl.rewards` whose own class says ``trusted = True``, see `Reward`: by the
    package and by the module that defines them. A class does not inherit it."""
    exported = {name: getattr(rewards, name) for name in rewards.__all__}
    trusted = {name: kind for name, kind in exported.items() if vars(kind).get("trusted") is True}
    return frozenset(f"{module}.{name}" for name, k in trusted.items() for module in (rewards.__name__, k.__module__))


class Untrusted(ValueError):
    """An export, run folder or checkpoint names something that is not used without ``--trust-rewards``."""


def check_rewards_trusted(specs: Any) -> None:
    """Refuses rewards that could do more than read text; looks at names and arguments only and imports nothing that
    they name.

    Args:
        specs: ``class_path`` and ``init_args`` of each reward, as a manifest or a run's configuration holds them.

    Raises:
        Untrusted: a reward, or one among the arguments of another, is not trusted, or has an argument that is not of
            JSON types or above ``LIMITS``; one line that names it and the flag.
        ValueError: ``specs`` is not a list of objects.
    """
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, Mapping) for spec in specs):
        raise ValueError(f"rewards must be a list of objects with class_path and init_args, got {_short(specs)}.")
    for spec in specs:
        _check(spec, trusted_rewards(), "reward")


def check_source_trusted(spec: Any) -> None:
    """Refuses a prompt source in a run's configuration that is not in ``SOURCES``; imports nothing.

    Raises:
        Untrusted: see `check_rewards_trusted`.
    """
    _check(spec, _paths("grpo_pl.data", SOURCES), "source")


def check_environment_trusted(spec: Any) -> None:
    """Refuses an environment of a run or an export that is none of ours, or names code elsewhere; imports nothing.

    Raises:
        Untrusted: see `check_rewards_trusted`.
    """
    allowed = _paths("grpo_pl.extras.agents", ENVIRONMENTS)
    _check(spec, allowed, "environment")
    for name, value in (spec.get("init_args") or {}).items():
        if name in _CALLED:
            known = all(defined_name(text) in ENVIRONMENT_FUNCTIONS for text in _texts(value))
        elif name == "parser":
            known = not isinstance(value, str) or defined_name(value) in allowed
        elif name == "kwargs":
            known = not any(_texts(value))  # which an environment may take for the names of files or classes
        else:
            known = not any(":" in text for text in _texts(value)) or name == "invalid"
        if not known:
            raise Untrusted(f"the environment {spec['class_path']!r} has {name}={_short(value)}: that needs {FLAG}.")


def refuse_own_classes(settings: Mapping[str, Any]) -> None:
    """Refuses settings of a run's module from which more than ours could be built; imports nothing.

    Besides rewards, environment and terms of the objective nothing may name a class: neither a ``class_path``, nor a
    key that is read as several (``engine.class_path``), nor a text in the place of fields, which is read as a class or
    a file of settings.

    Raises:
        Untrusted: see `check_rewards_trusted`.
    """
    check_rewards_trusted(settings.get("rewards") or [])
    if settings.get("environment") is not None:
        check_environment_trusted(settings["environment"])
    algorithm = settings.get("algorithm")
    if isinstance(algorithm, Mapping) and isinstance(terms := algorithm.get("terms"), Mapping):
        for term in terms.values():
            _check(term, _paths("grpo_pl.objective.terms", TERMS), "term of the objective")
        settings = {**settings, "algorithm": {key: value for key, value in algorithm.items() if key != "terms"}}
    for name, value in settings.items():
        if name in ("rewards", "environment"):
            continue
        known = name.isidentifier() and not isinstance(value, str) and is_plain(value) and not any(_named(value, 0))
        words = name in _FREE_TEXTS or all(_WORD.fullmatch(text) for text in _texts(value))
        if not known or not words or _has_text_for_fields(value, name):
            raise Untrusted(f"model.{_short(name)} is {_short(value)}, which may name code: that needs {FLAG}.")


_FREE_TEXTS = ("policy", "teacher", "teachers", "template", "sampling", "episodes", "reflection_words")
"""Settings of the module with texts of any kind; those of others are words."""
_WITH_FIELDS = ("lora", "from_scratch", "model", "examples", "plain_turns", "teachers")
"""Those of them that hold fields."""
_WORD = re.compile(r"[\w-]*")


def _has_text_for_fields(value: Any, name: str) -> bool:
    """True if a text stands at any depth where one of ``_WITH_FIELDS`` has fields, or names a kernel of the hub."""
    if isinstance(value, Mapping):
        return any(_has_text_for_fields(inner, name if name == "teachers" else key) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return any(_has_text_for_fields(inner, name) for inner in value)
    is_kernel = name == "attn_implementation" and "/" in str(value)  # which transformers fetches from the hub
    return isinstance(value, str) and (name in _WITH_FIELDS or is_kernel)


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain values, however deep, but for the names in mappings."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _texts(inner)


def _paths(package: str, modules: Mapping[str, Sequence[str]]) -> frozenset[str]:
    return frozenset(f"{package}.{module}.{name}" for module, names in modules.items() for name in names)


def _check(spec: Any, allowed: frozenset[str], what: str) -> None:
    for level, found in _specs(spec):
        class_path = found.get("class_path") if isinstance(found, Mapping) else found
        if not isinstance(found, Mapping) or not isinstance(class_path, str) or defined_name(class_path) not in allowed:
            raise Untrusted(
                f"the {what} {_short(class_path)} cannot be imported without {FLAG}: it is not a {what} of grpo_pl "
                f"that loads by itself. Give {FLAG} (trust_rewards=True in Python) if you know who wrote it."
            )
        further = found.keys() - {"class_path", "init_args"}
        arguments = found.get("init_args") or {}
        if further or level > _LEVELS or not isinstance(arguments, Mapping):
            raise Untrusted(f"the {what} {class_path!r} has more than class_path and init_args: it needs {FLAG}.")
        for name, value in arguments.items():
            # a dotted name would set an argument of an argument, such as the class of one
            if not (isinstance(name, str) and name.isidentifier()) or not is_plain(value) or _exceeds(name, value):
                raise Untrusted(f"the {what} {class_path!r} has {_short(name)}={_short(value)}: that needs {FLAG}.")


def _specs(value: Any, level: int = 0) -> Iterator[tuple[int, Any]]:
    """(depth, spec) of ``value`` and of everything in its arguments that names a class, at any depth."""
    yield level, value
    if not isinstance(value, Mapping) or level > _LEVELS:
        return
    arguments = value.get("init_args")
    if isinstance(arguments, Mapping):
        for name, inner in arguments.items():
            # where jsonargparse expects a class, a plain text is read as the name of one
            parts: Iterable[Any] = [inner]
            if inner is None or name not in ("source", "correct", "parts", "rewards"):
                parts = _named(inner, level)
            elif name in ("parts", "rewards") and isinstance(inner, Mapping):
                # anything but a mapping is refused: jsonargparse would read a text as a file with further classes
                parts = inner.values()
            for part in parts:
                yield from _specs(part, level + 1)


def _named(value: Any, level: int) -> Iterator[Any]:
    """Every object with a ``class_path`` in a value that should hold none, and everything nested deeper than
    ``_LEVELS``, which the caller refuses without looking further."""
    if level > _LEVELS or (isinstance(value, Mapping) and "class_path" in value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _named(inner, level + 1)


def _exceeds(name: str, value: Any) -> bool:
    """True if an argument in ``LIMITS`` is above its limit, or not a number, so that parsing could make it one."""
    if name not in LIMITS or value is None:
        return False
    return isinstance(value, bool) or not isinstance(value, int | float) or not value <= LIMITS[name]


def is_plain(value: Any, level: int = 0) -> bool:
    """True if a value is of JSON types only, without keys that jsonargparse interprets (``a.b``, ``a+``)."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if level > 2 * _LEVELS:
        return False
    if isinstance(value, Mapping):
        names_itself = (isinstance(key, str) and "." not in key and not key.endswith("+") for key in value)
        return all(names_itself) and all(is_plain(inner, level + 1) for inner in value.values())
    return isinstance(value, list | tuple) and all(is_plain(inner, level + 1) for inner in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
