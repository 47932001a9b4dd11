"""Overlap of training and held-out problems: exact repeats are refused, shared n-grams are reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_pl.data.cells import asked_key, image_digests
from grpo_pl.types import Problem

WORDS = 13
"""Words of an n-gram (Brown et al. 2020, "Language models are few-shot learners", appendix C)."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Problems of one held-out set that the training problems repeat or resemble."""

    held_out: int
    repeated: Sequence[Problem]
    """Held-out problems whose very question is trained on."""
    alike: Sequence[Problem]
    """Further held-out problems that share an n-gram with a training problem."""

    def __str__(self) -> str:
        ids = ", ".join(str(prompt.id) for prompt in self.alike[:5])
        more = " …" if len(self.alike) > 5 else ""
        return (
            f"{len(self.alike)} of {self.held_out} held-out problems share {WORDS} words in a row with a training "
            f"problem (ids {ids}{more})."
        )


def find_overlaps(train: Iterable[Problem], held_out: Mapping[str, Sequence[Problem]]) -> dict[str, Overlap]:
    """Compares every held-out problem with all training problems, set by set.

    The training problems may be a stream; what stays in memory is a number for each n-gram that is held out.
    Numbers and punctuation marks are words of their own; questions of fewer than ``WORDS`` can only repeat as a whole.
    """
    everything = [prompt for prompts in held_out.values() for prompt in prompts]
    whole = set(map(asked_key, everything)) - {""}  # asked by an environment, not by a question
    grams = {gram for prompt in everything for gram in _n_grams_of(prompt)}
    repeated: set[str] = set()
    shared: set[int] = set()
    for prompt in train:
        if (asked := asked_key(prompt)) in whole:
            repeated.add(asked)
        shared |= grams & _n_grams_of(prompt)
    found = {}
    for name, prompts in held_out.items():
        parts: tuple[list[Problem], list[Problem]] = ([], [])
        for prompt in prompts:
            parts[asked_key(prompt) in repeated].append(prompt)
        alike = [prompt for prompt in parts[False] if shared & _n_grams_of(prompt)]
        found[name] = Overlap(held_out=len(prompts), repeated=parts[True], alike=alike)
    return found


def _n_grams_of(prompt: Problem) -> set[int]:
    """Those of its question; of a problem with images none: many are asked in the same words of other images."""
    return set() if image_digests(prompt) else n_grams(prompt.question)


def n_grams(question: str, words: int = WORDS) -> set[int]:
    """All runs of ``words`` words of a question, as hashes."""
    split = _WORD.findall(question.casefold())
    return {hash(run) for run in zip(*(split[start:] for start in range(words)), strict=False)}


def refuse_repeats(overlaps: Mapping[str, Overlap], *, what: str = "training problems as well") -> None:
    """Refuses to measure on questions that are trained on.

    Args:
        what: what the held-out problems are that they should not be.
    """
    for name, overlap in overlaps.items():
        if overlap.repeated:
            raise ValueError(
                f"{len(overlap.repeated)} of {overlap.held_out} problems of {name} are {what}, such as "
                f"{overlap.repeated[0].question[:80]!r}: remove them, or set data.allow_overlap to true."
            )
