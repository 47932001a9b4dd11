"""torchmetrics over the completions of problems: exact over all batches and ranks, each with a confidence interval."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from grpo_pl.functional.estimates import Estimate, average_at_k, estimate_mean, majority_at_k, pass_at_k
from grpo_pl.types import CUT_OFF


class GroupMetric(Metric):
    """Mean over problems of one number per problem, computed from the first ``k`` of its samples or from all of them.

    Samples that could not be judged count neither as right nor as wrong. A problem with fewer than ``k`` judged samples
    is left out.

    Args:
        k: the k of the metric's name; a problem needs at least ``k`` samples.
    """

    full_state_update = False
    values: list[Tensor]
    ids: list[Tensor]

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        self.k = k
        self.add_state("values", [], dist_reduce_fx="cat")
        self.add_state("ids", [], dist_reduce_fx="cat")

    @abstractmethod
    def per_problem(self, samples: Tensor, judged: Tensor | None) -> Tensor:
        """(P, n) samples -> (P,) float64; NaN for a problem that is left out."""

    def update(
        self,
        samples: Tensor,
        valid: Tensor | None = None,
        ids: Tensor | None = None,
        judged: Tensor | None = None,
    ) -> None:
        """Adds problems.

        Args:
            samples: (P, n) with n >= k; their meaning depends on the subclass.
            valid: (P,) bool, false for problems that only fill up a batch; all true if not given.
            ids: (P,) int64 ids of the problems, for ``results``; 0, 1 … per call if not given.
            judged: (P, n) bool, samples whose reward is a number; all if not given.
        """
        values = self.per_problem(samples, judged)
        ids = torch.arange(len(values), device=values.device) if ids is None else ids
        told = ~values.isnan() if valid is None else valid & ~values.isnan()
        self.values.append(values[told])
        self.ids.append(ids[told])

    def compute(self) -> Tensor:
        """The mean over problems, float32; 0 without problems."""
        values = _join(self.values, torch.float64)
        return (values.sum() / max(1, len(values))).float()

    def estimate(self) -> Estimate:
        """The mean with its confidence interval, over all ranks; every rank must call it."""
        with self.sync_context():
            return estimate_mean(_join(self.values, torch.float64))

    def results(self) -> dict[int, float]:
        """Problem id -> its number, over all ranks and sorted by id; every rank must call it."""
        with self.sync_context():
            ids, values = _join(self.ids, torch.int64).tolist(), _join(self.values, torch.float64).tolist()
        return dict(sorted(zip(ids, values, strict=True)))


def correctness_metrics(ks: Iterable[int], samples: int) -> dict[str, GroupMetric]:
    """The metrics of correctness in training, validation, ``evaluate``, ``filter`` and the server: pass@k for each k in
    ``ks``, and maj@``samples`` if there are two samples or more."""
    metrics: dict[str, GroupMetric] = {f"pass@{k}": PassAtK(k) for k in ks}
    return metrics | ({f"maj@{samples}": MajorityAtK(samples)} if samples > 1 else {})


def pass_rates(values: Tensor) -> list[float | None]:
    """pass@1 of each problem from the values of the correctness reward, (P, n), NaN where a sample could not be judged;
    None for a problem of which no sample could be judged."""
    rates = pass_at_k(values >= 1.0, 1, ~values.isnan()).tolist()
    return [None if rate != rate else rate for rate in rates]


def _join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """A ``cat`` state as one tensor: before ranks exchange it, it is a list of tensors."""
    return torch.zeros(0, dtype=dtype) if isinstance(parts, list) and not parts else dim_zero_cat(parts)


class PassAtK(GroupMetric):
    """pass@k = mean over problems of 1 − C(n − c, k) / C(n, k), with c of n judged samples correct.

    Takes (P, n) bool. See ``grpo_pl.functional.estimates.pass_at_k``.
    """

    higher_is_better = True

    def per_problem(self, samples: Tensor, judged: Tensor | None) -> Tensor:
        return pass_at_k(samples, self.k, judged)


class MajorityAtK(GroupMetric):
    """maj@k: the share of problems for which the most frequent of k answers is right.

    Takes (P, n) answer classes as numbered by ``grpo_pl.rewards.voting.answer_classes``: 0 is right, negative is no
    answer. See ``grpo_pl.functional.estimates.majority_at_k``.
    """

    higher_is_better = True

    def per_problem(self, samples: Tensor, judged: Tensor | None) -> Tensor:
        return majority_at_k(samples, self.k, judged)


class AverageAtK(GroupMetric):
    """avg@k: mean over problems of the mean of the first k samples, for lengths, truncation or any other number.

    Takes (P, n) numbers; whether a sample could be judged does not matter.
    """

    def per_problem(self, samples: Tensor, judged: Tensor | None) -> Tensor:
        return average_at_k(samples, self.k)


class MeanReward(GroupMetric):
    """Mean over problems of the mean of the samples' rewards.

    Takes (P, n) numbers, NaN for a sample without a value.
    """

    higher_is_better = True

    def per_problem(self, samples: Tensor, judged: Tensor | None) -> Tensor:
        return samples.double().nanmean(dim=1)


def ks_of(n: int) -> list[int]:
    """The values of k for pass@k: powers of two below n, and n."""
    return sorted({1, n} | {2**i for i in range(1, n.bit_length()) if 2**i < n})


def summarise(results: Sequence[Mapping[str, Any]], *, n: int) -> dict[str, Any]:
    """Metrics over problems, from the per-problem results of an evaluation.

    A completion that could not be judged, because the gold answer could not be read or a judge could not be reached,
    counts neither as right nor as wrong; ``unjudged`` is their number, and ``unscored`` the number of problems without
    any judged completion. ``problems`` of a metric is the number of problems with enough judged completions for it.

    Args:
        results: one per problem with ``samples``, each of which has ``correct``, ``answer_class``, ``tokens`` and
            ``finish_reason``.
        n: samples per problem.
    """
    summary: dict[str, Any] = {"problems": len(results), "n": n, "metrics": {}}
    samples = [sample for result in results for sample in result["samples"]]
    summary["mean_length"] = sum(sample["tokens"] for sample in samples) / len(samples)
    summary["clipped_ratio"] = sum(sample["finish_reason"] in CUT_OFF for sample in samples) / len(samples)
    groups = [result["samples"] for result in results]
    judged = torch.tensor([[sample["correct"] is not None for sample in group] for group in groups])
    summary["unscored"], summary["unjudged"] = int((~judged.any(dim=1)).sum()), int((~judged).sum())
    correct = torch.tensor([[bool(sample["correct"]) for sample in group] for group in groups])
    classes = torch.tensor([[sample["answer_class"] for sample in group] for group in groups])
    for name, metric in correctness_metrics(ks_of(n), n).items():
        metric.update(classes if isinstance(metric, MajorityAtK) else correct, judged=judged)
        if metric.results():
            summary["metrics"][name] = asdict(metric.estimate())
    return summary
