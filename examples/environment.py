"""An environment of your own: a policy of 57,000 parameters learns to find a number in three guesses."""

import random
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

import grpo_pl as g
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.rollout.episode_settings import EpisodeSettings

SHAPE = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.08}


@dataclass(kw_only=True)
class Guessing(g.Environment):
    """Find a number from 1 to 7; each guess is answered by + (higher) or - (lower)."""

    def reset(self, *, seed: int, row: Any) -> tuple[str, dict[str, Any]]:
        self.number = random.Random(seed).randint(1, 7)
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not action.isdigit():
            return "?", 0.0, False, False, {"invalid_action": True}
        if int(action) == self.number:
            return "!", 1.0, True, False, {}
        return "+" if int(action) < self.number else "-", 0.0, False, False, {}


def main() -> None:
    module = g.GRPOModule(
        policy=g.PolicyConfig(
            from_scratch={"model_type": "qwen2", **SHAPE, **HEADS}, characters="\n0123456789+-?!", tags=[]
        ),
        environment=Guessing(isolation="thread"),  # a process of its own needs a class in a module
        rewards=[g.rewards.EnvironmentReward(correctness=True)],
        algorithm=g.GRPOAlgorithm(group_size=8, beta=0.0),
        sampling=g.SamplingParams(max_completion_length=1),  # of one action
        episodes=EpisodeSettings(max_turns=3),
        optimization=g.Optimization(lr=3e-3),
    )
    data = g.RolloutDataModule(SortingPrompts(), steps=150, prompts_per_step=16, val_prompts=64)
    g.check_start(module, data, print)
    with g.open_run("runs", "guessing") as run:
        Trainer(**g.trainer_arguments(run.folder, accelerator="cpu")).fit(module, data, weights_only=True)
    print(f"found: {module.held_out['val/pass@1'].mean:.2f}; episodes are in {run.folder.completions}")


if __name__ == "__main__":
    main()
