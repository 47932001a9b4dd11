"""Selects groups of samples and joins samples, as dynamic sampling needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_pl.rollout.decoding import join_rollouts, rollout_tensors
from grpo_pl.rollout.sampler import Samples


def select_groups(samples: Samples, groups: Sequence[int]) -> Samples:
    """The samples of some prompts, in the order of ``groups``."""
    rows = group_rows(groups, samples.rollout.group_size)
    index = torch.tensor(rows, dtype=torch.int64, device=samples.rollout.completion_ids.device)
    rollout = samples.rollout
    taken: dict[str, Any] = {name: tensor[index] for name, tensor in rollout_tensors(rollout).items()}
    taken["inputs"] = None if rollout.inputs is None else rollout.inputs[index]
    return replace(
        samples,
        prompts=[samples.prompts[g] for g in groups],
        prompt_texts=[samples.prompt_texts[g] for g in groups],
        completions=[samples.completions[r] for r in rows],
        episodes=None if samples.episodes is None else [samples.episodes[r] for r in rows],
        rollout=replace(rollout, finish_reasons=[rollout.finish_reasons[r] for r in rows], **taken),
    )


def join_samples(parts: Sequence[Samples], pad_token_id: int) -> Samples:
    """Samples of equal group size one after the other, padded to the longest prompt and completion among them."""
    return replace(
        parts[0],
        prompts=[prompt for part in parts for prompt in part.prompts],
        prompt_texts=[text for part in parts for text in part.prompt_texts],
        completions=[text for part in parts for text in part.completions],
        episodes=None if parts[0].episodes is None else [one for part in parts for one in part.episodes or ()],
        rollout=join_rollouts([part.rollout for part in parts], pad_token_id),
    )


def group_rows(groups: Sequence[int], group_size: int) -> list[int]:
    """Row numbers of whole groups."""
    return [group * group_size + sample for group in groups for sample in range(group_size)]


def samples_to(samples: Samples, device: torch.device) -> Samples:
    """The same samples with their tensors on ``device``."""
    return replace(samples, rollout=samples.rollout.to(device))
