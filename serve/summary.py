"""What a set of judged problems comes to: pass@1, unbiased pass@k and maj@k, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from grpo_pl.evaluation.metrics import MajorityAtK, correctness_metrics


def ks_of(n: int) -> list[int]:
    """The k that pass@k is told for: powers of two below n, and n."""
    return sorted({1, n} | {2**i for i in range(1, n.bit_length()) if 2**i < n})


def summarise(results: Sequence[Mapping[str, Any]], *, n: int) -> dict[str, Any]:
    """Metrics over problems, from the per-problem results of an evaluation.

    A completion that could not be judged, because the gold answer could not be read or a judge was not reachable,
    counts neither as right nor as wrong; ``unjudged`` is the number of these, and ``unscored`` that of problems without
    any other. A metric's ``problems`` are those with enough judged completions for it.

    Args:
        results: each with ``samples``, of which each holds ``correct``, ``answer_class``, ``tokens`` and
            ``finish_reason``.
        n: samples of a problem.
    """
    summary: dict[str, Any] = {"problems": len(results), "n": n, "metrics": {}}
    samples = [sample for result in results for sample in result["samples"]]
    summary["mean_length"] = sum(sample["tokens"] for sample in samples) / len(samples)
    summary["clipped_ratio"] = sum(sample["finish_reason"] == "length" for sample in samples) / len(samples)
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
