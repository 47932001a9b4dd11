"""Sums up an evaluation: unbiased pass@k and maj@k with confidence intervals, lengths and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from grpo_pl.evaluation.metrics import MajorityAtK, correctness_metrics
from grpo_pl.types import CUT_OFF


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
