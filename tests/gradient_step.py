"""A small policy, a rollout's experience, and one update by plain gradient descent at a rate of 1, so that weights move
by their gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.beside import Beside
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.update import PolicyUpdate, UpdateResult
from grpo_pl.types import Rollout

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def qwen(seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A random model of `SHAPE`, in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **shape}))


def rollout_of(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], group_size: int | None = None
) -> Rollout:
    """Rows that ended by themselves, of one group unless told otherwise; 0 is the padding."""
    prompt_ids, prompt_mask = pad_left(prompts, 0)
    flipped, mask = pad_left([row[::-1] for row in completions], 0)
    return Rollout(
        group_size=group_size or len(prompts),
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=flipped.flip(1),
        completion_mask=mask.flip(1),
        sampling_logprobs=torch.zeros(mask.shape),
        finish_reasons=["stop"] * len(prompts),
    )


def experience_of(
    rollout: Rollout, algorithm: GRPOAlgorithm, values: Tensor, *, longest: int, step: int = 0, **more: Any
) -> Experience:
    """The experience of one reward's ``values`` (P, G) for a rollout of one process."""
    lengths = rollout.action_lengths.view(values.shape)
    truncated = lengths == longest
    statistics = algorithm.advantages(
        values=values.unsqueeze(0),
        reward_weights=torch.ones(1, dtype=torch.float64),
        lengths=lengths,
        truncated=truncated,
        max_completion_length=longest,
    )
    given = {name: more.pop(name, None) for name in ("old_logprobs", "ref_logprobs", "entropy_mask")}
    tokens = {name: tensor for name, tensor in given.items() if tensor is not None}
    if algorithm.needs.sampling_logprobs:
        tokens["sampling_logprobs"] = rollout.sampling_logprobs
    return Experience(
        samples=Samples(prompts=[], prompt_texts=[], rollout=rollout, completions=[], step=step),
        scored=ScoredBatch(rewards=[], scores=[]),
        attempts=0,
        statistics=statistics,
        lengths=lengths,
        observed=rollout.observation_mask.sum(dim=1).view(values.shape),
        values=values.unsqueeze(0),
        truncated=truncated,
        first_row=0,
        advantages=statistics.advantages.flatten().unsqueeze(1),
        tokens=tokens,
        keep=statistics.keep.flatten(),
        active=statistics.active.flatten(),
        **more,
    )


def update(
    policy: PreTrainedModel,
    experience: Experience,
    algorithm: GRPOAlgorithm,
    beside: Beside = Beside(),  # noqa: B008 - nothing
    *,
    longest: int,
    max_tokens: int = 1000,
    budget: TokenBudget | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float = 0.0,
    backward: Callable[[Tensor, bool], None] = lambda loss, last: loss.backward(),
) -> UpdateResult:
    """Updates the policy in place."""
    stage = PolicyUpdate(
        algorithm=algorithm,
        optimization=Optimization(max_grad_norm=max_grad_norm),
        temperature=1.0,
        max_completion_length=longest,
        budget=budget or TokenBudget(configured=max_tokens),
        seed=0,
        collective=Collective(),
        report=lambda *_: None,
        beside=lambda number: beside,
    )
    return stage.run(policy, optimizer or torch.optim.SGD(policy.parameters(), lr=1.0), experience, backward)


def moved(policy: PreTrainedModel, *arguments: Any, **options: Any) -> tuple[Tensor, UpdateResult]:
    """By how much each weight of a copy moves in an `update`, in one vector."""
    ours = copy.deepcopy(policy)
    result = update(ours, *arguments, **options)
    return weights(ours) - weights(policy), result


def weights(policy: PreTrainedModel) -> Tensor:
    """All of them, in one vector."""
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def gradient(loss: Tensor, policy: PreTrainedModel) -> Tensor:
    """Of a loss in all weights, in one vector."""
    found = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())
