"""Measures ``RolloutStatistics``: completions and rewards of a rollout, and the change by its updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.doctor.answers import JUDGED
from grpo_pl.extras.doctor.run_statistics import RewardStatistics, RolloutStatistics, RunSettings
from grpo_pl.functional.estimates import Estimate
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rewards.base import Reward, Score, correctness_index
from grpo_pl.rewards.environment import EnvironmentReward
from grpo_pl.rewards.format import FormatReward
from grpo_pl.rewards.function import FunctionReward
from grpo_pl.training.checks import computes_in_float32_on_gpu
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import CUT_OFF

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_WEIGHTS = 1 << 16
"""Weights that are looked at before and after the updates."""


def run_settings(module: GRPOModule, data: RolloutDataModule) -> RunSettings:
    """The fields of a configuration that the rules read."""
    algorithm, policy = module.algorithm, module.policy
    trained = [] if policy is None else [p for p in policy.parameters() if p.requires_grad]
    return RunSettings(
        group_size=algorithm.group_size,
        prompts_per_update=data.prompt_count / algorithm.num_minibatches,
        rollouts=data.steps,
        temperature=module.sampling.temperature,
        length=module.sampling.max_completion_length,
        plays=module.environment is not None,
        cold_start=module.cold_start is not None,
        untaught=module.cold_start is None and module.policy_config.path is None,
        half_precision=bool(trained) and trained[0].dtype in (torch.bfloat16, torch.float16),
        float32_on_gpu=policy is not None
        and policy.device.type == "cuda"
        and computes_in_float32_on_gpu(module.trainer, policy.dtype),
    )


def held_out_share(module: GRPOModule, data: RolloutDataModule) -> Estimate | None:
    """pass@1 of the source's own held-out problems; None where training asks others than these: a file of its own, kept
    or chosen problems, groups that are drawn until they differ."""
    source, found = data.source, module.held_out.get("val/pass@1")
    chosen = module.algorithm.dynamic_sampling or type(source).observe is not PromptSource.observe
    leaves = source.leaves().values()
    other = any(getattr(leaf, "kept", None) or getattr(leaf, "val_path", None) for leaf in leaves)
    return None if found is None or chosen or other else found.estimate()


def weight_sample(policy: PreTrainedModel) -> list[Tensor]:
    """Equally many evenly spaced elements of each trained matrix that is no embedding, of this process's part."""
    layers = (policy.get_input_embeddings(), policy.get_output_embeddings())
    embeddings = {id(getattr(layer, "weight", None)) for layer in layers}
    matrices = [p for p in policy.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in embeddings]
    found = []
    for matrix in matrices:
        local = matrix.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.numel() and local.is_contiguous():
            stride = max(1, local.numel() * len(matrices) // MOST_WEIGHTS)
            found.append(local.view(-1)[::stride].clone())
    return found


def weight_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, Any]:
    """``moved`` and ``weight_change`` of `RolloutStatistics`, from a sample of the weights."""
    moved = [(b != a).double().mean().item() for b, a in zip(before, after, strict=True)]
    change = sum((a.double() - b.double()).square().sum().item() for b, a in zip(before, after, strict=True))
    size = sum(b.double().square().sum().item() for b in before)
    return {
        "moved": sum(moved) / len(moved) if moved else None,
        "weight_change": math.sqrt(change / size) if size else None,
    }


@torch.no_grad()
def policy_change(module: GRPOModule, experience: Experience, *, most: int, share: float) -> dict[str, Any]:
    """``logprob_change``, ``kl`` and ``entropy`` of `RolloutStatistics`, after the updates of a rollout.

    Args:
        most: completions whose log-probabilities are computed once more, at least one.
        share: of the rollout's completions, if those are fewer.
    """
    rollout = experience.rollout
    count = len(rollout.finish_reasons)
    most = min(most, max(1, int(count * share)))
    rows = torch.arange(0, count, max(1, count // most), device=rollout.completion_ids.device)[:most]
    part = rollout_rows(rollout, rows)
    temperature, policy = module.sampling.temperature, module.require_policy()
    now, entropy = completion_logprobs(policy, **part, temperature=temperature, with_entropy=True)
    mask = part["action_mask"]
    old = rollout.sampling_logprobs if experience.old_logprobs is None else experience.old_logprobs
    delta = (now.double() - old[rows][:, : mask.shape[1]].double())[mask]
    if not len(delta) or entropy is None:
        return {}
    return {
        "logprob_change": delta.abs().mean().item(),
        "kl": (delta.exp() - 1.0 - delta).mean().item(),
        "entropy": entropy[mask].double().mean().item(),
    }


def measure_rollout(experience: Experience, rewards: Sequence[Reward]) -> RolloutStatistics:
    """Statistics of completions and rewards; texts are of this process, numbers of the whole batch."""
    statistics, samples, rollout = experience.statistics, experience.samples, experience.rollout
    judge = correctness_index(rewards)
    judged = torch.full_like(experience.values[0], math.nan) if judge is None else experience.values[judge]  # (P, G)
    right, cut = judged >= 1.0, experience.truncated
    differ = [len(set(row[~row.isnan()].tolist())) > 1 for row in judged]
    statuses = [score.status for score in experience.scored.judged()]
    silent = judge is None or isinstance(rewards[judge], FunctionReward | EnvironmentReward)
    unanswered = [silent or status == "no_answer" for status in statuses]
    lost = sum(r in CUT_OFF and u for r, u in zip(rollout.finish_reasons, unanswered, strict=True)) / len(statuses)
    tokens = rollout.completion_ids.masked_fill(~rollout.completion_mask, -1).unflatten(0, (-1, rollout.group_size))
    same = (tokens == tokens[:, :1]).flatten(1).all(dim=1)  # of this process's groups
    both = [
        statistics.rewards[i][right[i]].mean() - statistics.rewards[i][judged[i] < 1.0].mean()
        for i in range(len(judged))
        if right[i].any() and (judged[i] < 1.0).any()
    ]
    groups, completions = judged.shape[0], judged.numel()
    lacking = [f"{e.status}: {e.detail}" for e in samples.episodes or () if e.value is None]
    counted = [e for e in samples.episodes or () if e.value is not None and e.status not in ("ok", "policy")]
    return RolloutStatistics(
        groups=groups,
        completions=completions,
        mixed=int(statistics.informative.sum()),
        mixed_answers=sum(differ),
        right=int(right.sum()),
        cut=int(cut.sum()),
        cut_unpaid=min(round(completions * lost), int((cut & ~(judged > 0.0)).sum())),
        cut_right=int((cut & right).sum()),
        no_answer=round(completions * statuses.count("no_answer") / len(statuses)),
        identical=round(groups * same.double().mean().item()),
        left_out=round(completions * len(lacking) / len(statuses)),
        left_out_by=next(iter(lacking), ""),
        failed=round(completions * len(counted) / len(statuses)),
        failed_by=next((f"{e.status}: {e.detail}" for e in counted), ""),
        questions=len({prompt.question for prompt in samples.prompts}),
        prompts=len(set(samples.prompt_texts)),
        gap=torch.stack(both).double().mean().item() if both else None,
        rewards=tuple(
            _measure_reward(reward, values, scores, samples.completions, rollout.group_size)
            for reward, values, scores in zip(rewards, experience.values, experience.scored.scores, strict=True)
        ),
    )


def _measure_reward(
    reward: Reward, values: Tensor, scores: Sequence[Score], texts: Sequence[str], group_size: int
) -> RewardStatistics:
    known = values[~values.isnan()]
    equal, differed = repeated_texts(texts, scores, group_size)
    return RewardStatistics(
        name=reward.name,
        weight=reward.weight,
        correctness=reward.correctness,
        least=known.min().item() if len(known) else None,
        most=known.max().item() if len(known) else None,
        earned=isinstance(reward, FormatReward | FunctionReward),
        form=isinstance(reward, FormatReward),
        equal_texts=equal,
        differed=differed,
    )


def repeated_texts(texts: Sequence[str], scores: Sequence[Score], group_size: int) -> tuple[int, int]:
    """Number of completions that repeat an earlier one of their group, and of those with another value than it."""
    equal = differed = 0
    for start in range(0, len(texts), group_size):
        values: Mapping[str, list[float]] = defaultdict(list)
        for text, score in zip(texts[start : start + group_size], scores[start : start + group_size], strict=True):
            if score.value is not None and score.status in JUDGED:
                values[text].append(score.value)
        for first, *others in values.values():
            equal += len(others)
            differed += sum(value != first for value in others)
    return equal, differed
