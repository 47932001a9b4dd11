"""A reward of your own: a policy of 57,000 parameters learns from it alone to write digits in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning.pytorch import Trainer

import grpo_pl as g
from grpo_pl.data.tasks.sorting import SortingPrompts

SHAPE = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.08}


@dataclass(kw_only=True)
class RisingReward(g.Reward):
    """Share of neighbours of which the second is the larger digit; range [0, 1], and right at 1."""

    name: str = "rising"

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[g.Score]:
        shares = [sum(a < b for a, b in pairwise(text)) / 3 for text in completions]
        return [g.Score(share, "ok" if share == 1.0 else "wrong") for share in shares]


def main() -> None:
    module = g.GRPOModule(
        policy=g.PolicyConfig(from_scratch={"model_type": "qwen2", **SHAPE, **HEADS}, characters="0123456789", tags=[]),
        rewards=[RisingReward(correctness=True)],
        algorithm=g.GRPOAlgorithm(group_size=8, beta=0.0),
        sampling=g.SamplingParams(max_completion_length=4),
        optimization=g.Optimization(lr=3e-3),
    )
    data = g.RolloutDataModule(SortingPrompts(), steps=60, prompts_per_step=16, val_prompts=32)
    g.check_start(module, data, print)
    with g.open_run("runs", "rising") as run:
        Trainer(**g.trainer_arguments(run.folder, accelerator="cpu")).fit(module, data, weights_only=True)
    print(f"right: {module.held_out['val/pass@1'].mean:.2f}; completions are in {run.folder.completions}")


if __name__ == "__main__":
    main()
