"""Writes a trained policy as a Hugging Face folder, with the prompt template and rewards of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpo_pl
from grpo_pl.files.writing import staged_folder, system_errors
from grpo_pl.policy.loading import end_token_ids
from grpo_pl.policy.lora import has_adapters, merged
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.pretrained import MANIFEST
from grpo_pl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CARD = "README.md"
"""File in the folder with the model card, which the hub shows."""

SAMPLING = ("max_completion_length", "thinking_budget", "stop", "stop_token_ids")
"""Fields of `SamplingParams` that the manifest keeps; the temperature is in ``transformers``' generation config."""


def export_policy(
    folder: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    rewards: Sequence[Reward | Mapping[str, Any]],
    sampling: SamplingParams,
    environment: Mapping[str, Any] | None = None,
    episodes: Mapping[str, Any] | None = None,
    algorithm: Mapping[str, Any] | None = None,
    precision: str = "",
    decoder: str = "",
    merge: bool = True,
    card: str = "",
) -> None:
    """Writes safetensors, tokenizer, generation config, ``grpo_pl.json`` and the model card, atomically.

    Args:
        folder: a new or empty folder, or an earlier export, which is replaced.
        rewards: the rewards of the training, or the ``class_path`` and ``init_args`` of each.
        environment: ``class_path`` and ``init_args`` of the environment of the training, if there was one.
        episodes: the settings of its episodes.
        algorithm: the fields of the objective of the training, for the advantages that a server shows.
        precision: ``trainer.precision`` of the training, in which it is served.
        decoder: what drew its completions in a native engine.
        card: text of ``README.md``; none is written if it is empty.
        merge: add LoRA adapters to the weights; false writes the adapters only, which need their base model.

    Raises:
        ValueError: ``folder`` holds something other than an earlier export.
        OSError: the folder cannot be written; an earlier export is kept.
    """
    from transformers import GenerationConfig

    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is no earlier export ({MANIFEST} is missing): choose another folder.")
    if merge and has_adapters(model):
        model = merged(model)
    with staged_folder(folder) as staging:
        with system_errors():
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_completion_length,
            eos_token_id=end_token_ids(model, tokenizer, sampling) or None,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(staging)
        tree = manifest(template, rewards, sampling)
        if environment is not None:
            tree |= {"environment": _published(environment), "episodes": dict(episodes or {})}
        tree["algorithm"] = dict(algorithm or {})
        tree |= {"precision": precision, "decoder": decoder}
        (staging / MANIFEST).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        if card:  # in the place of the one that peft writes
            (staging / CARD).write_text(card, encoding="utf-8")


def _published(value: Any) -> Any:
    """Settings without what may hold a secret: variables of an agent, headers of a client."""
    if isinstance(value, Mapping):
        return {name: _published(each) for name, each in value.items() if name not in ("variables", "headers")}
    return [_published(each) for each in value] if isinstance(value, list | tuple) else value


def manifest(
    template: PromptTemplate, rewards: Sequence[Reward | Mapping[str, Any]], sampling: SamplingParams
) -> dict[str, Any]:
    """The content of ``grpo_pl.json``: JSON values that rebuild the template, the rewards and ``SAMPLING``."""
    return {
        "grpo_pl_version": grpo_pl.__version__,
        "template": template.to_dict(),
        **{name: getattr(sampling, name) for name in SAMPLING},
        "rewards": [reward.spec() if isinstance(reward, Reward) else dict(reward) for reward in rewards],
    }
