"""``grpo-pl export``: any checkpoint of a run as a Hugging Face folder, here or on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_pl.files.checkpoints import PATTERN, rollouts_of
from grpo_pl.files.runs import RunFolder, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.policy.trained import ServedModel

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""A repository's name on the hub, with its owner."""


def export(
    checkpoint: Path,
    out: Path,
    merge: bool = True,
    push_to_hub: str | None = None,
    private: bool = True,
    license: str = "",
    dry_run: bool = False,
) -> None:
    """Writes the policy of a checkpoint with its tokenizer, generation config, prompt template, rewards and model card.

    The run's config.yaml, two folders above the checkpoint, says what the policy is; its metrics.csv has the figures of
    the model card.

    Args:
        checkpoint: a checkpoint of a run, or the run's folder for its last one.
        out: the folder to write; an earlier export there is replaced as a whole.
        merge: add LoRA adapters to the weights; false writes the adapters alone, beside the name of their base model,
            which all commands then load with them.
        push_to_hub: also upload the folder to this repository (owner/name), which is made if it is not there; by the
            token of `hf auth login` or $HF_TOKEN.
        private: a repository that is made is private; false makes it public.
        license: identifier of the licence for the model card, such as apache-2.0; by default that of a base model in a
            local folder.
        dry_run: write and upload nothing; print the model card and what would be done.
    """
    from grpo_pl.evaluation.model_card import model_card
    from grpo_pl.policy.trained import find_model, refuse_code, without_link

    if push_to_hub is not None and not REPOSITORY.fullmatch(push_to_hub):
        raise ValueError(f"--push-to-hub {push_to_hub!r} is no repository: give owner/name.")
    given = RunFolder(checkpoint)
    found = given.last_checkpoint if given.config.is_file() else checkpoint
    trained = without_link(find_model(found, trust_rewards=True))  # rewards are copied here, not built
    refuse_code(trained)
    run = given
    if not given.config.is_file():  # that which the checkpoint or the export lies in; it may hold nothing of a run
        inside = trained.source.absolute().parent
        run = RunFolder(inside if trained.checkpoint is None else inside.parent)
    card = model_card(
        run,
        name=(push_to_hub or trained.name).rpartition("/")[2],
        rewards=trained.rewards,
        rollouts=rollouts_of(trained.source) if trained.source.match(PATTERN) else None,
        license=license,
    )
    if dry_run:
        print(card)
        target = f" and upload it to {'a private' if private else 'the public'} {push_to_hub}" if push_to_hub else ""
        print(f"(dry run: would write {out}{target})")
        return
    _write(trained, run, out, card, merge=merge)
    print(out)
    if push_to_hub is not None:
        print(_push(out, push_to_hub, private=private))


def _write(trained: ServedModel, run: RunFolder, out: Path, card: str, *, merge: bool) -> None:
    from grpo_pl.policy.export import export_policy
    from grpo_pl.policy.lora import has_adapters

    model = trained.load_policy("cpu")
    if not merge:
        if not has_adapters(model):
            raise ValueError(f"{trained.source} has no adapters (policy.lora is null): leave --merge at true.")
        _name_base(model, dict(read_settings(run.config.read_text(encoding="utf-8"))["model"]))
    export_policy(out, trained, model=model, tokenizer=trained.tokenizer, merge=merge, card=card)


def _push(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads the folder; the address of the commit."""
    from huggingface_hub import HfApi

    hub = HfApi(library_name="grpo_pl")
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        weights = ["*.safetensors", "*.safetensors.index.json"]  # of an earlier upload that had other parts
        commit = hub.upload_folder(
            repo_id=repository, folder_path=folder, delete_patterns=weights, commit_message=f"Upload {folder.name}"
        )
    except Exception as error:  # errors of its own, of the system, of HTTP: the export is there, whatever it was
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} is written, but was not uploaded to {repository}: {reason:.300}") from error
    return str(commit.commit_url)


def _name_base(model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Writes into the adapters which model they belong to."""
    from grpo_pl.policy.gguf_files import as_folder
    from grpo_pl.policy.lora import base_of

    path = config["policy"].get("path")
    if path is None or config.get("cold_start") is not None or base_of(path) != path:
        raise ValueError(
            "these adapters belong to a model that nobody else has (made from scratch, by a cold start or of other "
            "adapters): leave --merge at true."
        )
    source = as_folder(path)  # of a GGUF file, which no library of adapters reads
    base = str(Path(source).resolve()) if Path(source).is_dir() else path
    for adapters in model.peft_config.values():
        adapters.base_model_name_or_path = base
