"""The answers of two policies to the same problems side by side: who solves what, and how sure the difference is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_pl.functional.estimates import (
    RESAMPLES,
    Estimate,
    bootstrap_interval,
    mcnemar_exact,
    paired_difference,
    unpaired_difference,
)
from grpo_pl.types import Problem

FEW = 10
"""Fewer problems that differ are too few for a bootstrap of zeros and ones: without any its interval is a point."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion of one problem."""

    text: str
    correct: bool | None
    """None where it could not be judged."""
    tokens: int
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One problem with the answers of both; answers of equal place have equal keys."""

    problem: Problem
    a: Sequence[Answer]
    b: Sequence[Answer]

    @property
    def shares(self) -> tuple[Fraction, Fraction] | None:
        """The shares of right answers among those that were judged, of both; None where one of them has none."""
        found = [[each.correct for each in side if each.correct is not None] for side in (self.a, self.b)]
        if not all(found):
            return None
        first, second = (Fraction(sum(side), len(side)) for side in found)
        return first, second

    @property
    def solved(self) -> tuple[bool, bool]:
        """Whether more than half of the judged answers are right, of both; with one answer, whether it is right."""
        assert self.shares is not None
        first, second = self.shares
        return first > Fraction(1, 2), second > Fraction(1, 2)


@dataclass(frozen=True)
class PairedProblems:
    """One set of held-out problems, answered by both."""

    pairs: Sequence[Pair]
    """Those on both sides of which at least one answer was judged."""
    unjudged: int = 0
    """Problems that are left out because on one side no answer could be judged."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> PairedProblems:
        """The problems that can be compared.

        Raises:
            ValueError: there is none.
        """
        kept = [pair for pair in pairs if pair.shares is not None]
        if not kept:
            raise ValueError(
                f"of {len(pairs)} problems none has a judged answer on both sides: look at the gold answers and the "
                "correctness reward (grpo-pl score)."
            )
        return cls(kept, len(pairs) - len(kept))

    @cached_property
    def cells(self) -> dict[str, int]:
        """The number of problems that are solved by ``both``, ``only_a``, ``only_b`` and ``neither``."""
        names = {(True, True): "both", (True, False): "only_a", (False, True): "only_b", (False, False): "neither"}
        found = [names[pair.solved] for pair in self.pairs]
        return {name: found.count(name) for name in names.values()}

    @property
    def p_value(self) -> float:
        """McNemar's exact test of the problems that one alone solves: small where the two are not equally good."""
        return mcnemar_exact(self.cells["only_b"], self.cells["only_a"])

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """The shares of right answers: (P,) float64 of both."""
        shares = [pair.shares for pair in self.pairs]
        first, second = (torch.tensor([float(share[side]) for share in shares if share]).double() for side in (0, 1))
        return first, second

    @property
    def differing(self) -> int:
        """The number of problems whose shares are not equal."""
        first, second = self.values
        return int((first != second).sum())

    @cached_property
    def paired(self) -> Estimate:
        """pass@1 of b minus that of a with its 95 % interval over problems, each problem paired with itself."""
        return paired_bootstrap(*self.values)

    @cached_property
    def unpaired(self) -> Estimate:
        """The same with the interval as if the two had been measured on different problems."""
        first, second = self.values
        return unpaired_difference(second, first)

    @property
    def width_ratio(self) -> float | None:
        """Width of the paired interval over that of the unpaired one; None where neither varies."""
        wide = self.unpaired.high - self.unpaired.low
        return (self.paired.high - self.paired.low) / wide if wide else None

    @cached_property
    def flipped(self) -> list[Pair]:
        """The problems that one alone solves: first those that b gained, then those that b lost."""
        return [pair for wanted in ((False, True), (True, False)) for pair in self.pairs if pair.solved == wanted]

    def as_json(self) -> dict[str, Any]:
        """Plain values for programs and the page."""
        first, second = (values.mean().item() for values in self.values)
        return {
            "problems": len(self.pairs),
            "left_out_unjudged": self.unjudged,
            **self.cells,
            "mcnemar_p": self.p_value,
            "pass@1": {
                "a": first,
                "b": second,
                "difference": self.paired.value,
                "paired": _interval(self.paired),
                "unpaired": _interval(self.unpaired),
                "width_ratio": self.width_ratio,
            },
            "flipped": [
                {
                    "id": pair.problem.id,
                    "question": pair.problem.question,
                    "answer": pair.problem.answer,
                    "solved_by": "b" if pair.solved[1] else "a",
                    "a": [asdict(each) for each in pair.a],
                    "b": [asdict(each) for each in pair.b],
                }
                for pair in self.flipped
            ],
        }


def _interval(estimate: Estimate) -> dict[str, Any]:
    return {"low": estimate.low, "high": estimate.high, "method": estimate.method}


def paired_bootstrap(baseline: Tensor, values: Tensor, *, resamples: int = RESAMPLES) -> Estimate:
    """Mean of ``values − baseline`` with a bootstrap interval of 95 % over problems.

    A problem is resampled with all its answers on both sides, so answers of one problem need not be independent. If all
    values are 0 or 1 and fewer than `FEW` problems differ, the interval is that of `paired_difference`, by Agresti and
    Min, which is no point even if none does.

    Args:
        baseline: (P,) one number per problem.
        values: (P,) of the same problems in the same order.
        resamples: number of bootstrap resamples.

    Raises:
        ValueError: no values, or tensors of different shapes.
    """
    if not len(values) or values.shape != baseline.shape:
        raise ValueError(f"a paired difference needs the same problems twice, got {len(values)} and {len(baseline)}.")
    gaps = values.double() - baseline.double()
    both = torch.cat([values, baseline])
    if int((gaps != 0).sum()) < FEW and bool(((both == 0) | (both == 1)).all()):
        return paired_difference(values, baseline)
    low, high = bootstrap_interval(gaps, resamples=resamples)
    return Estimate(value=gaps.mean().item(), low=low, high=high, problems=len(gaps), method="bootstrap")


def joined(problems: Mapping[str, Sequence[Problem]], a: Answers, b: Answers) -> dict[str, PairedProblems]:
    """Set -> its problems with the answers of both; a set without judged answers on both sides is left out.

    Raises:
        ValueError: no set is left, see `PairedProblems.of`.
    """
    pairs = {
        name: [Pair(problem=each, a=a[name, each.id], b=b[name, each.id]) for each in asked]
        for name, asked in problems.items()
    }
    judged = {name: of for name, of in pairs.items() if any(pair.shares is not None for pair in of)}
    return {name: PairedProblems.of(of) for name, of in (judged or pairs).items()}


Answers = Mapping[tuple[str, int], Sequence[Answer]]
"""(set, problem id) -> completions, in the order of their samples."""
