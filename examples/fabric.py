"""GRPO in a loop of Lightning Fabric: a policy of 57,000 parameters learns to sort digits; fabric.py SEED"""

import sys

import torch
from lightning.fabric import Fabric

import grpo_pl as g
from grpo_pl import functional as F
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.policy.loading import load_model, load_tokenizer
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.sampler import CompletionSampler

SHAPE = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False, "initializer_range": 0.08}
STEPS, PROMPTS, GROUP, UPDATES, RATE, LENGTH = 400, 32, 8, 4, 3e-3, 4


def train(seed: int) -> float:
    """Mean points of the last ten rollouts, of 7 at most."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(seed)
    config = g.PolicyConfig(from_scratch={"model_type": "qwen2", **SHAPE, **HEADS}, characters="0123456789", tags=[])
    tokenizer = load_tokenizer(config)
    policy = load_model(config, tokenizer)
    model, optimizer = fabric.setup(policy, torch.optim.AdamW(policy.parameters(), weight_decay=0.0))
    sampler = CompletionSampler(engine=g.NativeEngine(), template=g.PromptTemplate(), tokenizer=tokenizer)
    source, reward = SortingPrompts(), g.rewards.SortingReward(credit="inclusion_order_simple")
    asked = {"group_size": GROUP, "sampling": g.SamplingParams(max_completion_length=LENGTH), "split": "train"}
    points = []
    for step in range(STEPS):
        samples = sampler.sample(policy, source.prompts(step, count=PROMPTS), seed=seed, step=step, **asked)
        answers = [problem.answer for problem in samples.per_row]
        scores = reward(samples.completions, answers, samples.columns())
        rewards = 7 * torch.tensor([score.value for score in scores]).view(PROMPTS, GROUP)
        advantages = F.subtract_baseline(rewards, rewards.isfinite(), baseline="group_mean").view(-1, 1)
        points.append(rewards.mean().item())
        drawn = samples.rollout
        size = {"num_sequences": len(scores), "num_tokens": int(drawn.lengths.sum()), "max_completion_length": LENGTH}
        weights = F.token_weights(drawn.completion_mask, aggregation="sequence_mean", **size)
        rows = {n: getattr(drawn, n) for n in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        optimizer.param_groups[0]["lr"] = RATE * (1 - 0.9 * step / STEPS)
        for _ in range(UPDATES):
            ratio = (completion_logprobs(policy, **rows, temperature=1.0)[0] - drawn.sampling_logprobs).exp()
            optimizer.zero_grad()
            fabric.backward(-(weights * F.clip_surrogate(ratio, advantages, epsilon_low=0.2, epsilon_high=0.2)).sum())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        if step % 20 == 19:
            fabric.print(f"rollout {step + 1}: {sum(points[-10:]) / 10:.2f} of 7 points", flush=True)
    return sum(points[-10:]) / 10


if __name__ == "__main__":
    train(int(sys.argv[1]) if sys.argv[1:] else 0)
