"""Writes a trained policy as a Hugging Face folder, with the prompt template and rewards of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpo_pl
from grpo_pl.files.writing import staged_folder, system_errors
from grpo_pl.policy.inputs import reader_of
from grpo_pl.policy.loading import end_token_ids
from grpo_pl.policy.lora import has_adapters, merged
from grpo_pl.policy.pretrained import MANIFEST
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.weights import weights_digest, weights_in
from grpo_pl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CARD = "README.md"
"""File in the folder with the model card, which the hub shows."""

MOST_TOKENS = "max_image_tokens"
"""Key of the manifest of a policy that reads images, and field of `PolicyConfig`."""
SAMPLING = ("max_completion_length", "thinking_budget", "stop", "stop_token_ids")
"""Fields of `SamplingParams` that the manifest keeps; the temperature is in ``transformers``' generation config."""


@dataclass(frozen=True, kw_only=True)
class TrainedWith:
    """What a policy's training tells to whoever uses it: a server, an export, a further training."""

    template: PromptTemplate
    rewards: Sequence[Mapping[str, Any]]
    """``class_path`` and ``init_args`` of each reward."""
    sampling: SamplingParams
    environment: Mapping[str, Any] | None = None
    """``class_path`` and ``init_args`` of the environment; None for single turns."""
    episodes: Mapping[str, Any] = field(default_factory=dict)
    """The settings of episodes of many turns."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the objective; nothing where an export does not say."""
    precision: str = ""
    """``trainer.precision`` when the training last began or was resumed; empty if not recorded."""
    decoder: str = ""
    """Decoder in a native engine: a decode kernel by its name, or ``torch``; empty if not recorded."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """``name`` of the run and ``step``, its completed rollouts; of an export also the digests ``weights`` of the policy
    in its run and ``files`` of the weights in the folder. Nothing if not recorded."""

    def manifest(self) -> dict[str, Any]:
        """The content of ``grpo_pl.json``: JSON values that rebuild it, of ``sampling`` those in ``SAMPLING``."""
        tree = {
            "grpo_pl_version": grpo_pl.__version__,
            "template": self.template.to_dict(),
            **{name: getattr(self.sampling, name) for name in SAMPLING},
            "rewards": list(self.rewards),
        }
        if self.environment is not None:
            tree |= {"environment": _published(self.environment), "episodes": dict(self.episodes)}
        tree |= {"algorithm": dict(self.algorithm), "precision": self.precision, "decoder": self.decoder}
        return tree | ({"run": dict(self.run)} if self.run else {})


def export_policy(
    folder: Path,
    trained: TrainedWith,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    merge: bool = True,
    card: str = "",
) -> None:
    """Writes safetensors, tokenizer, generation config, ``grpo_pl.json`` and the model card, atomically.

    Args:
        folder: a new or empty folder, or an earlier export, which is replaced.
        merge: add LoRA adapters to the weights; false writes the adapters only, which need their base model.
        card: text of ``README.md``; none is written if it is empty.

    Raises:
        ValueError: ``folder`` holds something other than an earlier export.
        OSError: the folder cannot be written; an earlier export is kept.
    """
    from transformers import GenerationConfig

    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is no earlier export ({MANIFEST} is missing): choose another folder.")
    run = {"weights": weights_digest(model.state_dict().items()), **trained.run} if trained.run else {}
    if merge and has_adapters(model):
        model = merged(model)
    with staged_folder(folder) as staging:
        with system_errors():
            model.save_pretrained(staging)
            (reader_of(tokenizer) or tokenizer).save_pretrained(staging)
        if run:
            run["files"] = weights_digest(weights_in(staging))
        GenerationConfig(
            do_sample=True,
            temperature=trained.sampling.temperature,
            max_new_tokens=trained.sampling.max_completion_length,
            eos_token_id=end_token_ids(model, tokenizer, trained.sampling) or None,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(staging)
        manifest = replace(trained, run=run).manifest()
        if (reader := reader_of(tokenizer)) is not None:
            manifest[MOST_TOKENS] = reader.most_tokens
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if card:  # in the place of the one that peft writes
            (staging / CARD).write_text(card, encoding="utf-8")


def _published(value: Any) -> Any:
    """Settings without what may hold a secret: variables of an agent, headers of a client."""
    if isinstance(value, Mapping):
        return {name: _published(each) for name, each in value.items() if name not in ("variables", "headers")}
    return [_published(each) for each in value] if isinstance(value, list | tuple) else value
