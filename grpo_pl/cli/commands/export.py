"""``grpo-pl export``: any checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_pl.files.runs import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(checkpoint: Path, out: Path, merge: bool = True) -> None:
    """Writes the policy of a checkpoint with its tokenizer, generation config, prompt template and rewards.

    The run's config.yaml, two folders above the checkpoint, says what the policy is.

    Args:
        checkpoint: a checkpoint of a run, or the run's folder for its last one.
        out: the folder to write; an earlier export there is replaced as a whole.
        merge: add LoRA adapters to the weights; false writes the adapters alone, beside the name of their base model.
    """
    from grpo_pl.policy.export import export_policy
    from grpo_pl.policy.lora import has_adapters
    from grpo_pl.policy.trained import find_model

    run = RunFolder(checkpoint)
    found = run.last_checkpoint if run.config.is_file() else checkpoint
    trained = find_model(found, trust_rewards=True)  # rewards are copied here, not built
    model = trained.load_policy("cpu")
    if not merge:
        if not has_adapters(model):
            raise ValueError(f"{checkpoint} has no adapters (policy.lora is null): leave --merge at true.")
        _name_base(model, _run_config(checkpoint, run))
    export_policy(
        out,
        model=model,
        tokenizer=trained.tokenizer,
        template=trained.template,
        rewards=trained.rewards,
        sampling=trained.sampling,
        environment=trained.environment,
        episodes=trained.episodes,
        merge=merge,
    )
    print(out)


def _run_config(checkpoint: Path, run: RunFolder) -> dict[str, Any]:
    run = run if run.config.is_file() else RunFolder(checkpoint.absolute().parent.parent)
    return dict(yaml.safe_load(run.config.read_text())["model"])


def _name_base(model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Writes into the adapters which model they belong to.

    Raises:
        ValueError: there is no model that others could load and that the adapters fit.
    """
    path = config["policy"].get("path")
    if path is None or config.get("cold_start") is not None:
        raise ValueError(
            "these adapters belong to a model that nobody else has (made from scratch or by a cold start): "
            "leave --merge at true."
        )
    base = str(Path(path).resolve()) if Path(path).is_dir() else path
    for adapters in model.peft_config.values():
        adapters.base_model_name_or_path = base
