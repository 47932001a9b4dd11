"""Measures and plots the two biases of GRPO: a token's weight by length, and a question's weight by difficulty.

Run ``python docs/plots/biases.py``; writes ``length_bias`` and ``difficulty_bias`` as CSV and PNG beside this file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from grpo_pl.objective.algorithm import GRPOAlgorithm

LENGTHS = (1, 2, 5, 10, 20, 50, 100, 150, 200)
PASS_RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")
DIFFICULTY_CHOICES = {
    "grpo, group of 64": {"group_size": 64, "baseline": "group_mean", "scale": "group_std"},
    "grpo, group of 8": {"group_size": 8, "baseline": "group_mean", "scale": "group_std"},
    "batch_std, group of 8": {"group_size": 8, "baseline": "group_mean", "scale": "batch_std"},
    "rloo, group of 8": {"group_size": 8, "baseline": "leave_one_out", "scale": "none"},
    "dr_grpo, group of 8": {"group_size": 8, "baseline": "group_mean", "scale": "none"},
}


def token_weights_by_length() -> dict[str, list[float]]:
    """|dL/dlogprob| of one token, for completions of every length in one batch, all with advantage 1."""
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < lengths.unsqueeze(1)
    table = {}
    for aggregation in AGGREGATIONS:
        algorithm = GRPOAlgorithm(aggregation=aggregation, beta=0.0)  # type: ignore[arg-type]
        logprobs = torch.full(mask.shape, -1.0, requires_grad=True)
        weights = algorithm.token_weights(
            mask, num_sequences=len(LENGTHS), num_tokens=int(lengths.sum()), max_completion_length=max(LENGTHS)
        )
        tokens = {"logprobs": logprobs, "advantages": torch.ones(len(LENGTHS), 1), "mask": mask}
        algorithm.loss(tokens, weights).loss.backward()
        assert logprobs.grad is not None
        table[aggregation] = logprobs.grad[:, 0].abs().tolist()
    return table


def question_weights_by_pass_rate(samples: int, seed: int) -> dict[str, list[float]]:
    """How much of the gradient of its pass rate each question contributes; 1 is the policy gradient itself.

    A question is a coin with logit x and pass rate p = sigmoid(x). The loss of sampled groups is differentiated by x
    and divided by dp/dx = p (1 − p). All questions share a batch, as they do in training.
    """
    table = {}
    for name, choices in DIFFICULTY_CHOICES.items():
        algorithm = GRPOAlgorithm(beta=0.0, **choices)  # type: ignore[arg-type]
        groups = samples // algorithm.group_size
        generator = torch.Generator().manual_seed(seed)
        rates = torch.tensor(PASS_RATES, dtype=torch.float64).repeat_interleave(groups)  # (P,)
        draws = torch.rand(len(rates), algorithm.group_size, generator=generator, dtype=torch.float64)
        table[name] = _question_weights(algorithm, rates, (draws < rates[:, None]).double())
    return table


def _question_weights(algorithm: GRPOAlgorithm, rates: Tensor, rewards: Tensor) -> list[float]:
    logits = rates.logit().requires_grad_()
    right = torch.nn.functional.logsigmoid(logits)[:, None]
    wrong = torch.nn.functional.logsigmoid(-logits)[:, None]
    result = algorithm.advantages(
        values=rewards.unsqueeze(0),
        reward_weights=torch.ones(1),
        lengths=torch.ones_like(rewards, dtype=torch.int64),
        truncated=torch.zeros_like(rewards, dtype=torch.bool),
    )
    mask = torch.ones(rewards.numel(), 1, dtype=torch.bool)
    tokens = {
        "logprobs": torch.where(rewards > 0, right, wrong).reshape(-1, 1),
        "advantages": result.advantages.reshape(-1, 1),
        "mask": mask,
    }
    weights = torch.full(mask.shape, 1 / rewards.shape[1], dtype=torch.float64)  # the mean over each group
    output = algorithm.loss(tokens, weights)
    (gradient,) = torch.autograd.grad(-output.loss, logits)
    return (gradient / (rates * (1 - rates))).view(len(PASS_RATES), -1).mean(1).tolist()


def save(folder: Path, name: str, axis: str, points: Sequence[float], table: dict[str, list[float]]) -> None:
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([axis, *table])
        for i, point in enumerate(points):
            writer.writerow([point, *(f"{values[i]:.6g}" for values in table.values())])


def plot(
    folder: Path, name: str, labels: tuple[str, str], points: Sequence[float], table: dict[str, list[float]], log: bool
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (label, values), marker in zip(table.items(), "os^Dv", strict=False):
        axes.plot(points, values, marker=marker, markersize=4, label=label)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if log:
        axes.set(xscale="log", yscale="log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / f"{name}.png", dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--samples", type=int, default=160_000, help="completions drawn per pass rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    length = token_weights_by_length()
    save(args.out, "length_bias", "length", LENGTHS, length)
    plot(args.out, "length_bias", ("completion tokens", "weight of one token"), LENGTHS, length, log=True)
    difficulty = question_weights_by_pass_rate(args.samples, args.seed)
    labels = ("pass rate of the question", "weight of its policy gradient")
    save(args.out, "difficulty_bias", "pass_rate", PASS_RATES, difficulty)
    plot(args.out, "difficulty_bias", labels, PASS_RATES, difficulty, log=False)


if __name__ == "__main__":
    main()
