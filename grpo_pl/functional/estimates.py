"""pass@k, maj@k and means per problem, and confidence intervals of means over problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

RESAMPLES = 10_000
"""Bootstrap resamples: the ends of a 95 % interval are then steady to about a twentieth of its width."""
_CHUNK = 2_000_000  # indices drawn at a time, to bound memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over problems with its confidence interval."""

    value: float
    low: float
    high: float
    problems: int  # number of problems that the mean is over
    method: Literal["wilson", "bootstrap", "agresti-min"]


def pass_at_k(correct: Tensor, k: int, judged: Tensor | None = None) -> Tensor:
    """1 − C(n − c, k) / C(n, k) per problem, with c of n samples correct: probability that one of k draws is correct.

    Args:
        correct: (P, n) bool, n >= k.
        k: draws without replacement from the n samples.
        judged: (P, n) bool, samples that could be judged; the others count neither as right nor as wrong, so the n of
            the formula is the number of judged ones. All by default.

    Returns:
        (P,) float64; NaN for a problem with fewer than k judged samples, for which pass@k is not defined.

    Raises:
        ValueError: fewer than k samples per problem, or k below 1.

    Source: Chen et al. 2021, "Evaluating large language models trained on code", eq. 1.
    """
    _check_k("pass", k, correct.shape[1])
    judged = torch.ones_like(correct, dtype=torch.bool) if judged is None else judged
    n = judged.sum(dim=1)  # (P,)
    wrong = n - (correct.bool() & judged).sum(dim=1)
    # C(n - c, k) / C(n, k) as a product of k factors; a factor reaches 0 where fewer than k samples are wrong
    draws = torch.arange(k, device=correct.device)
    misses = (wrong[:, None] - draws).clamp(min=0) / (n[:, None] - draws).clamp(min=1).double()
    return (1.0 - misses.prod(dim=1)).masked_fill(n < k, torch.nan)


def majority_at_k(classes: Tensor, k: int, judged: Tensor | None = None) -> Tensor:
    """Probability that the most frequent answer among the first k judged samples is right, with ties broken at random.

    Args:
        classes: (P, n) integers, n >= k: equal numbers are equal answers, 0 is the right one, negative is no answer.
        k: samples that vote.
        judged: (P, n) bool, samples that could be judged; the others have no vote. All by default.

    Returns:
        (P,) float64: 1 / (number of most frequent answers) where the right one is among them, else 0; 0 without
        answers; NaN with fewer than k judged samples.

    Raises:
        ValueError: fewer than k samples per problem, or k below 1.

    Source: Wang et al. 2022, "Self-consistency improves chain of thought reasoning in language models", section 2.
    """
    _check_k("maj", k, classes.shape[1])
    judged = torch.ones_like(classes, dtype=torch.bool) if judged is None else judged
    votes = classes.gather(1, (~judged).int().argsort(dim=1, stable=True))[:, :k]  # (P, k), judged ones first
    counts = (votes[:, :, None] == votes[:, None, :]).sum(dim=2) * (votes >= 0)  # (P, k): votes for the same answer
    top = counts.amax(dim=1, keepdim=True)
    leads = (counts == top) & (votes >= 0)  # every leading answer has `top` rows here
    right = (leads & (votes == 0)).sum(dim=1).double() / leads.sum(dim=1).clamp(min=1)
    return right.masked_fill(judged.sum(dim=1) < k, torch.nan)


def average_at_k(values: Tensor, k: int) -> Tensor:
    """Mean of the first k samples per problem: (P, n) -> (P,) float64.

    Raises:
        ValueError: fewer than k samples per problem, or k below 1.
    """
    _check_k("avg", k, values.shape[1])
    return values[:, :k].double().mean(dim=1)


def estimate_mean(values: Tensor) -> Estimate:
    """Mean over problems with Wilson's interval of 95 % if all values are 0 or 1, else with a bootstrap over problems.

    Samples of one problem are correlated, so the unit is the problem: if each sample counted as a trial, the interval
    of pass@1 would be too narrow.

    Args:
        values: (P,) one number per problem, in any order.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("no problems to estimate a mean from.")
    values, binary = values.double(), bool(((values == 0) | (values == 1)).all())
    low, high = wilson_interval(int(values.sum()), len(values)) if binary else bootstrap_interval(values)
    method: Literal["wilson", "bootstrap"] = "wilson" if binary else "bootstrap"
    return Estimate(value=values.mean().item(), low=low, high=high, problems=len(values), method=method)


def paired_difference(values: Tensor, baseline: Tensor) -> Estimate:
    """Mean of ``values − baseline`` over the same problems, with its confidence interval of 95 %.

    If all values are 0 or 1, the interval is that of Agresti and Min, which has a width above 0 even if no pair
    differs: with b problems gained and c lost of n, centre (b − c) / (n + 2) and variance
    [(b + c + 1) / (n + 2) − centre²] / (n + 2). For other values it is a bootstrap over problems.

    Args:
        values: (P,) one number per problem.
        baseline: (P,) of the same problems in the same order.

    Raises:
        ValueError: no values, or tensors of different shapes.

    Source: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched proportions".
    """
    if not len(values) or values.shape != baseline.shape:
        raise ValueError(f"a paired difference needs the same problems twice, got {len(values)} and {len(baseline)}.")
    values, baseline = values.double(), baseline.double()
    difference = values - baseline
    mean, n = difference.mean().item(), len(difference)
    both = torch.cat([values, baseline])
    if ((both == 0) | (both == 1)).all():
        gained, lost = int((difference > 0).sum()), int((difference < 0).sum())
        centre = (gained - lost) / (n + 2)
        half = _z(0.95) * math.sqrt(max(0.0, (gained + lost + 1) / (n + 2) - centre**2) / (n + 2))
        low, high = max(-1.0, centre - half), min(1.0, centre + half)
        return Estimate(value=mean, low=low, high=high, problems=n, method="agresti-min")
    low, high = bootstrap_interval(difference)
    return Estimate(value=mean, low=low, high=high, problems=n, method="bootstrap")


def wilson_interval(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """(p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), for p = successes / trials and n = trials.

    Raises:
        ValueError: no trials, successes outside 0 … trials, or a level outside (0, 1).

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no proportion.")
    z, p = _z(level), successes / trials
    centre = (p + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    # for p = 0 and p = 1 the formula gives 0 and 1 exactly, floating point does not
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


def bootstrap_interval(
    values: Tensor, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Quantiles (1 − level) / 2 and (1 + level) / 2 of the means of resampled problems; independent of their order.

    Args:
        values: (P,) one number per problem.
        level: confidence level, in (0, 1).
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.

    Raises:
        ValueError: a level outside (0, 1).

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".
    """
    _check_level(level)
    means = _resampled_means(values, resamples, torch.Generator().manual_seed(seed))
    return _middle(means, level)


def unpaired_difference(
    values: Tensor, baseline: Tensor, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Mean of ``values`` − mean of ``baseline`` with the bootstrap interval that two lists of problems have which are
    not paired: each is resampled by itself.

    For policies on the same problems `paired_difference` is the right one; this is what it is held against.

    Args:
        values: (P,) one number per problem, in any order, and ``baseline`` likewise.
        level: confidence level, in (0, 1).
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.

    Raises:
        ValueError: no values, or a level outside (0, 1).

    Source: Efron and Tibshirani 1993, "An introduction to the bootstrap", section 8.3, the two-sample problem.
    """
    _check_level(level)
    if not len(values) or not len(baseline):
        raise ValueError("no problems to estimate a difference from.")
    generator = torch.Generator().manual_seed(seed)
    one, two = (_resampled_means(side, resamples, generator) for side in (values, baseline))
    low, high = _middle(one - two, level)
    gap = values.double().mean() - baseline.double().mean()
    return Estimate(value=gap.item(), low=low, high=high, problems=min(len(values), len(baseline)), method="bootstrap")


def mcnemar_exact(gained: int, lost: int) -> float:
    """min(1, 2 · Σ_{i ≤ min(b, c)} C(b + c, i) / 2^(b + c)): the two-sided p-value of McNemar's exact test.

    The chance that the b pairs that changed in one direction and the c in the other are at least as far apart, if both
    directions are equally likely.

    Args:
        gained: b, pairs that changed from wrong to right.
        lost: c, pairs that changed from right to wrong.

    Raises:
        ValueError: a number below 0.

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages";
    the exact form, a sign test, is equation 10.4 of Agresti 2002, "Categorical data analysis".
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"numbers of pairs must be at least 0, got {gained} and {lost}.")
    pairs, term, tail = gained + lost, 1, 0
    for i in range(min(gained, lost) + 1):
        tail += term
        term = term * (pairs - i) // (i + 1)  # C(pairs, i + 1), of exact integers
    return min(1.0, 2 * tail / (1 << pairs))


def _resampled_means(values: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """Means of ``resamples`` samples with replacement, (resamples,) float64; they depend on no order of the values."""
    ordered = values.double().cpu().sort().values
    means = []
    size = len(ordered)
    for start in range(0, resamples, max(1, _CHUNK // size)):
        rows = min(resamples - start, max(1, _CHUNK // size))
        means.append(ordered[torch.randint(size, (rows, size), generator=generator)].mean(dim=1))
    return torch.cat(means)


def _middle(means: Tensor, level: float) -> tuple[float, float]:
    tail = (1.0 - level) / 2.0
    low, high = means.quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1, got {level}.")


def _z(level: float) -> float:
    _check_level(level)
    return NormalDist().inv_cdf((1.0 + level) / 2.0)


def _check_k(name: str, k: int, n: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    if n < k:
        raise ValueError(f"{name}@{k} needs at least {k} samples a problem, got {n}.")
