"""A program of yours, trained as it is: it asks OpenAI's client for guesses, and never knows that somebody learns."""

import random
from typing import Any

from lightning.pytorch import Trainer
from openai import OpenAI

import grpo_pl as g
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.policy.dialogue import PlainTurns
from grpo_pl.rollout.episode_settings import EpisodeSettings

SHAPE = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.08}


def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Lets the model find a number from 1 to 7 in three guesses; answers + (higher) or - (lower)."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": "?"}]
    number = random.Random(task["seed"]).randint(1, 7)
    for _ in range(3):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        if said == str(number):
            return 1.0
        hint = "?" if said not in list("1234567") else "+" if int(said) < number else "-"
        messages += [{"role": "assistant", "content": said or ""}, {"role": "user", "content": hint}]
    return 0.0


def main() -> None:
    module = g.GRPOModule(
        policy=g.PolicyConfig(
            from_scratch={"model_type": "qwen2", **SHAPE, **HEADS}, characters="\n0123456789+-?", tags=[]
        ),
        environment=AgentEnvironment(agent=f"{__file__}:run", rewarded_by="agent"),
        rewards=[g.rewards.EnvironmentReward(correctness=True)],
        algorithm=g.GRPOAlgorithm(group_size=8, beta=0.0),
        sampling=g.SamplingParams(max_completion_length=1),  # of one answer
        episodes=EpisodeSettings(max_turns=3, plain_turns=PlainTurns(observation="{observation}")),
        optimization=g.Optimization(lr=3e-3),
    )
    data = g.RolloutDataModule(SortingPrompts(), steps=40, prompts_per_step=16, val_prompts=32)
    g.check_start(module, data, print)
    with g.open_run("runs", "agent") as run_:
        Trainer(**g.trainer_arguments(run_.folder, accelerator="cpu")).fit(module, data, weights_only=True)
    print(f"found: {module.held_out['val/pass@1'].mean:.2f}; sessions are in {run_.folder.completions}")


if __name__ == "__main__":
    main()
