"""The rewards that the package ships, as tests of all of them go through them."""

import inspect
from typing import Any

import grpo_pl.rewards
from grpo_pl.rewards import ExactReward, Reward

SHIPPED: dict[str, type[Reward]] = {
    name: kind
    for name in grpo_pl.rewards.__all__
    if isinstance(kind := getattr(grpo_pl.rewards, name), type)
    and issubclass(kind, Reward)
    and not inspect.isabstract(kind)
}
"""Class name -> every reward of ``grpo_pl.rewards.__all__`` that can be made."""
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "MathReward": {
        "last number": {"answer_in": "last_number"},
        "auto": {"answer_in": "auto"},
        "json": {"answer_in": "json"},
    },
    "ExactReward": {
        "pattern": {"answer_in": "pattern", "answer_pattern": "."},
        "last number": {"answer_in": "last_number"},
        "auto": {"answer_in": "auto"},
        "json": {"answer_in": "json"},
    },
    "FormatReward": {"partial": {"partial": True, "allow_text": True}, "no box": {"require_box": False}},
    "StrictAnswerReward": {"text": {"allow_text": True}},
    "LengthReward": {"cosine": {"shape": "cosine", "correct": ExactReward()}, "budget": {"shape": "budget"}},
    "RepetitionReward": {"character": {"unit": "character"}},
    "LanguageConsistencyReward": {"ru": {"language": "ru"}},
    "SortingReward": {"distance": {"credit": "distance"}, "simple": {"credit": "inclusion_order_simple"}},
}
"""Class name -> a name for other arguments than the defaults -> these arguments."""
NAMES = [name for kind in SHIPPED for name in (kind, *(f"{kind} {form}" for form in FORMS.get(kind, ())))]
"""A name for each reward in each form, as `make` reads it."""


def make(name: str, **needed: Any) -> Reward:
    """The reward of one of ``NAMES``.

    Args:
        name: a class, and maybe one of its forms.
        needed: arguments that the class has no defaults for, or that the test chooses.
    """
    kind, _, form = name.partition(" ")
    return SHIPPED[kind](**needed, **(FORMS[kind][form] if form else {}))
