"""Selects groups of samples and joins samples, as dynamic sampling needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import NO_TOKEN, NO_TURN, NO_VERSION, Rollout

PADDED = {
    "prompt_ids": "left",
    "prompt_mask": "left",
    "completion_ids": "right",
    "completion_mask": "right",
    "sampling_logprobs": "right",
    "action_mask": "right",
    "turn_index": "right",
    "segment_index": "right",
    "policy_version": "right",
}
"""Tensors of a `Rollout`, a row for each completion, and the side on which their rows are padded."""
OPTIONAL: dict[str, float] = {"support": NO_TOKEN, "top_ids": NO_TOKEN, "top_logprobs": -torch.inf, "thoughts": 0}
"""Tensors that only some rollouts have, (B, T, K) each (``thoughts``: T is 1), and their padding."""


def select_groups(samples: Samples, groups: Sequence[int]) -> Samples:
    """The samples of some prompts, in the order of ``groups``."""
    rows = group_rows(groups, samples.rollout.group_size)
    index = torch.tensor(rows, dtype=torch.int64, device=samples.rollout.completion_ids.device)
    rollout = samples.rollout
    return replace(
        samples,
        prompts=[samples.prompts[g] for g in groups],
        prompt_texts=[samples.prompt_texts[g] for g in groups],
        completions=[samples.completions[r] for r in rows],
        episodes=None if samples.episodes is None else [samples.episodes[r] for r in rows],
        rollout=replace(
            rollout,
            finish_reasons=[rollout.finish_reasons[r] for r in rows],
            **{name: tensor[index] for name, tensor in rollout_tensors(rollout).items()},
        ),
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


def join_rollouts(rollouts: Sequence[Rollout], pad_token_id: int) -> Rollout:
    """Rollouts of equal group size one after the other, padded likewise."""
    tokens = dict.fromkeys(("prompt_ids", "completion_ids"), pad_token_id)
    fill = {**tokens, "turn_index": NO_TURN, "policy_version": NO_VERSION}
    tensors: dict[str, Tensor | None] = {}
    for name, side in PADDED.items():
        rows: list[Tensor] = [getattr(rollout, name) for rollout in rollouts]
        width = max(part.shape[1] for part in rows)
        missing = [width - part.shape[1] for part in rows]
        sides = [(n, 0) if side == "left" else (0, n) for n in missing]
        tensors[name] = torch.cat([pad(p, s, value=fill.get(name, 0)) for p, s in zip(rows, sides, strict=True)])
    for name, value in OPTIONAL.items():
        parts: list[Tensor] = [getattr(rollout, name) for rollout in rollouts if getattr(rollout, name) is not None]
        tensors[name] = None  # each has its own T and K, or none has any
        if parts:
            width, most = (max(part.shape[axis] for part in parts) for axis in (1, 2))
            wide = [pad(p, (0, most - p.shape[2], 0, width - p.shape[1]), value=value) for p in parts]
            tensors[name] = torch.cat(wide)
    reasons = [reason for rollout in rollouts for reason in rollout.finish_reasons]
    return replace(rollouts[0], finish_reasons=reasons, **tensors)  # type: ignore[arg-type]


def rollout_tensors(rollout: Rollout) -> dict[str, Any]:
    """The tensors of a rollout by name, without those that it lacks."""
    return {name: getattr(rollout, name) for name in (*PADDED, *OPTIONAL) if getattr(rollout, name) is not None}


def group_rows(groups: Sequence[int], group_size: int) -> list[int]:
    """Row numbers of whole groups."""
    return [group * group_size + sample for group in groups for sample in range(group_size)]


def samples_to(samples: Samples, device: torch.device) -> Samples:
    """The same samples with their tensors on ``device``."""
    return replace(samples, rollout=samples.rollout.to(device))
