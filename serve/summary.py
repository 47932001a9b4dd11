"""What a set of judged problems comes to: pass@1, unbiased pass@k and maj@k, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from grpo_pl.functional.estimates import estimate_mean, majority_at_k, pass_at_k


def ks_of(n: int) -> list[int]:
    """The k that pass@k is told for: powers of two below n, and n."""
    return sorted({1, n} | {2**i for i in range(1, n.bit_length()) if 2**i < n})


def summarise(results: Sequence[Mapping[str, Any]], *, n: int) -> dict[str, Any]:
    """Metrics over problems, from the per-problem results of an evaluation.

    A problem whose gold answer could not be read, or whose judge was not reachable, says nothing about the policy and
    is left out; ``unscored`` counts these.

    Args:
        results: each with ``samples``, of which each holds ``correct``, ``answer_class``, ``tokens`` and
            ``finish_reason``.
        n: samples of a problem.
    """
    judged = [r["samples"] for r in results if all(s["correct"] is not None for s in r["samples"])]
    summary: dict[str, Any] = {"problems": len(results), "unscored": len(results) - len(judged), "n": n, "metrics": {}}
    samples = [sample for result in results for sample in result["samples"]]
    summary["mean_length"] = sum(sample["tokens"] for sample in samples) / len(samples)
    summary["clipped_ratio"] = sum(sample["finish_reason"] == "length" for sample in samples) / len(samples)
    if not judged:
        return summary
    correct = torch.tensor([[sample["correct"] for sample in group] for group in judged])
    classes = torch.tensor([[sample["answer_class"] for sample in group] for group in judged])
    values = {f"pass@{k}": pass_at_k(correct, k) for k in ks_of(n)}
    if n > 1:
        values[f"maj@{n}"] = majority_at_k(classes, n)
    summary["metrics"] = {name: asdict(estimate_mean(value)) for name, value in values.items()}
    return summary
