"""Problems with the images of others: what a policy that looks at its images cannot answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_pl.data.cells import image_digests
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

_SHIFTS = 50
"""Permutations that are tried, for one that gives few problems the images they have."""


def with_images_of_others(problems: Sequence[Problem], seed: int = 0) -> list[Problem]:
    """The problems, each with the images of another one that has as many; question, answer and id stay.

    The images are permuted, so each comes as often as before. Left out are problems without images, and those for which
    no others are there.

    Args:
        seed: names the permutation; for one seed and list it is always the same.
    """
    sizes: dict[int, list[Problem]] = {}
    for problem in problems:
        if digests := image_digests(problem):
            sizes.setdefault(len(digests), []).append(problem)
    given: dict[tuple[str, int], Problem] = {}
    for group in sizes.values():
        group.sort(key=lambda problem: row_key(seed, "images of others", problem.source, problem.id))
        shown = [image_digests(problem) for problem in group]
        equal = {
            shift: sum(one == other for one, other in zip(shown, [*shown[shift:], *shown[:shift]], strict=True))
            for shift in range(1, min(len(group), _SHIFTS))
        }
        best = min(equal, key=equal.__getitem__, default=0)
        for problem, other in zip(group, [*group[best:], *group[:best]], strict=True):
            if image_digests(problem) != image_digests(other):
                columns = {**problem.columns, "images": other.columns["images"]}
                given[problem.source, problem.id] = replace(problem, columns=columns)
    return [given[key] for problem in problems if (key := (problem.source, problem.id)) in given]
