"""``ServedModel``: a trained policy with its tokenizer, template and rewards, from an export or a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_pl.files.rows import read_object
from grpo_pl.policy.export import MOST_TOKENS, SAMPLING, TrainedWith
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer, model_config
from grpo_pl.policy.lora import ADAPTERS, base_of
from grpo_pl.policy.pretrained import MANIFEST, check_folder, is_there
from grpo_pl.policy.quiet import quiet_libraries
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.trust import FLAG, Untrusted, check_rewards_trusted, is_plain
from grpo_pl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_pl.extras.agents.tool_form import ToolForm

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that are part of ``transformers``; other names are repositories of the hub."""
SETTINGS = "settings"
"""Key of a checkpoint for the settings of its run's module. Under ``hyper_parameters``, Lightning's name for such, a
``LightningCLI`` would let them win over the command line, and import what they name."""
RECORD = "run.json"
"""As in ``RunFolder``, which imports torch."""
_HARMLESS = {"megatron_core": "megatron.core"}
"""Values that ``peft`` writes by default."""
_KINDS: Mapping[type, str] = {dict: "an object with fields", list: "a list", str: "a text"}
_NESTED = ("examples", "lora", "from_scratch")
"""Fields that hold fields in turn."""
T = TypeVar("T")


class NoSettings(ValueError):
    """A checkpoint of a run that was made in Python: its weights are all that is known of it."""


@dataclass(frozen=True, kw_only=True)
class ServedModel(TrainedWith):
    """A trained policy: its files, and the settings of its training; creating it loads nothing."""

    name: str
    """Name that clients use: that of the run, or of the folder."""
    source: Path
    """The export folder or checkpoint that was found."""
    policy: PolicyConfig
    checkpoint: Path | None
    """Training checkpoint that holds the weights; None if they are under ``policy.path``."""
    examples: Sequence[Mapping[str, Any]] = ()
    """``problem``, ``answer`` and further ``columns`` of some problems of the task, where its run is at hand."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All settings of ``model`` in the run of a checkpoint; nothing for an export."""
    trust_rewards: bool = False
    """True if any class may be built as a reward; otherwise only those in ``grpo_pl.rewards.trust``."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.policy)

    @cached_property
    def context(self) -> int | None:
        """Most tokens of a prompt and its completion together; None if the model's config does not say."""
        return context_length(model_config(self.policy, self.tokenizer))

    @property
    def version(self) -> str:
        """A name that differs from that of other weights: the checkpoint's or folder's, and a digest of the names,
        sizes and times of its files."""
        files = [*self.source.glob("*")] if self.source.is_dir() else [self.source]
        stats = [(file.name, file.stat(follow_symlinks=file.exists())) for file in files]  # a link may lead nowhere
        facts = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        return f"{self.source.name.removesuffix('.ckpt')}-{hashlib.blake2b(repr(facts).encode()).hexdigest()[:8]}"

    @cached_property
    def tools(self) -> ToolForm:
        """The form in which the policy reads descriptions of tools and writes calls."""
        from grpo_pl.extras.agents.tool_form import ToolForm

        return ToolForm.of(self.environment, self.episodes, trust=self.trust_rewards)

    def computing(self, policy: PreTrainedModel) -> AbstractContextManager[Any]:
        """Inside, ``policy`` computes in bfloat16 if it was trained with ``bf16-mixed`` and the machine has products in
        that type; else, as outside, in the type of its weights."""
        import torch

        from grpo_pl.functional.gemm import multiplies_bfloat16

        kind = policy.device.type
        if self.precision != "bf16-mixed" or (kind == "cpu" and not multiplies_bfloat16()):
            return nullcontext()
        return torch.autocast(kind, dtype=torch.bfloat16)

    def load_policy(self, device: str) -> PreTrainedModel:
        """Loads the policy to a device, in evaluation mode. Reads tensors only and runs no pickled code.

        Raises:
            ValueError: the checkpoint does not fit the policy of its run.
        """
        quiet_libraries()
        frozen = self.policy.quantization is not None  # a checkpoint holds what was trained alone
        model = load_model(self.policy, self.tokenizer, weights=self.checkpoint is None or frozen)
        if self.checkpoint is not None:
            from grpo_pl.files.checkpoints import policy_weights
            from grpo_pl.files.sharded_checkpoints import read_checkpoint
            from grpo_pl.policy.weights import load_whole

            weights = policy_weights(read_checkpoint(self.checkpoint))
            try:
                load_whole(model, weights)
            except ValueError as error:
                raise ValueError(f"{self.checkpoint} does not fit the policy of its run: {error}") from error
        return model.to(device).eval()  # type: ignore[arg-type]


def find_model(path: str | Path, *, trust_rewards: bool = False) -> ServedModel:
    """The trained policy at ``path``; imports nothing that its files name.

    Args:
        path: an exported folder, a run folder (its export, or else its last checkpoint), or a checkpoint file.
        trust_rewards: allow its files to name any class as a reward; use it only if their author is known.

    Raises:
        ValueError: there is nothing that can be served, or (``Untrusted``, without ``trust_rewards``) its files name a
            class or a setting that could run other code.
    """
    model = _found(Path(path))
    if trust_rewards:
        return replace(model, trust_rewards=True)
    check_rewards_trusted(model.rewards)
    refuse_code(model)
    return model


def without_link(model: ServedModel) -> ServedModel:
    """The same with the checkpoint that its file, such as ``last.ckpt``, links to: the link may soon lead elsewhere."""
    if model.checkpoint is None:
        return model
    return replace(model, source=model.checkpoint.resolve(), checkpoint=model.checkpoint.resolve())


def _found(path: Path) -> ServedModel:
    if path.is_dir():
        is_there(path / MANIFEST)  # refuses a link that leads nowhere
    if not path.exists():
        raise ValueError(f"no such model: {path}. Give an exported folder, a run folder or a checkpoint.")
    if path.is_file() or path.suffix == ".ckpt":
        return _from_checkpoint(path)
    if (path / MANIFEST).is_file():
        return _from_export(path)
    from grpo_pl.files.runs import RunFolder  # imports torch, which an export does not need

    run = RunFolder(path)
    if (run.export / MANIFEST).is_file():
        return _from_export(run.export)
    if run.config.is_file() and run.last_checkpoint.exists():
        return _from_checkpoint(run.last_checkpoint)
    raise ValueError(f"{path} holds neither {MANIFEST} nor a run with a checkpoint: export the policy there first.")


def _from_export(folder: Path) -> ServedModel:
    check_folder(folder)
    file, generation = folder / MANIFEST, folder / "generation_config.json"
    manifest = read_object(file)
    temperature = read_object(generation).get("temperature") if generation.is_file() else None
    sampling = {name: manifest[name] for name in SAMPLING if name in manifest}
    where = folder.resolve()
    return ServedModel(
        name=where.parent.name if where.name == "export" else where.name,
        source=folder,
        policy=PolicyConfig(path=str(folder), dtype="auto", **_images(manifest, file)),
        checkpoint=None,
        template=_build(PromptTemplate, _field(manifest, "template", dict, file), "template", file),
        **_settings(manifest, file),
        precision=_field(manifest, "precision", str, file, default=""),
        decoder=_field(manifest, "decoder", str, file, default=""),
        run={name: value for name, value in _field(manifest, "run", dict, file, default={}).items() if name != "files"},
        examples=_examples(where.parent),
        sampling=_build(SamplingParams, {"temperature": temperature or 1.0, **sampling}, "sampling", file),
    )


def _images(manifest: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Fields of a policy that reads images; nothing for one of text."""
    most = manifest.get(MOST_TOKENS)
    if most is None:
        return {}
    if type(most) is not int or most < 1:
        raise ValueError(f"{file}: {MOST_TOKENS} must be a number above 0, got {most!r:.60}.")
    return {"images": True, MOST_TOKENS: most}


def _from_checkpoint(file: Path) -> ServedModel:
    from grpo_pl.files.checkpoints import PATTERN, rollouts_of
    from grpo_pl.files.runs import RunFolder

    run = RunFolder(file.absolute().parent.parent)
    model, origin = _run_settings(file, run.config)
    parts = {name: _field(model, name, dict, origin, default={}) for name in ("template", "sampling")}
    return ServedModel(
        name=run.path.name,
        source=file,
        policy=_build(PolicyConfig, _field(model, "policy", dict, origin), "policy", origin),
        checkpoint=file,
        template=_build(PromptTemplate, parts["template"], "template", origin),
        **_settings(model, origin),
        **_compute(run.path),
        run={"name": run.path.name, "step": rollouts_of(file.resolve())} if file.resolve().match(PATTERN) else {},
        examples=_examples(run.path),
        sampling=_build(SamplingParams, parts["sampling"], "sampling", origin),
        settings=model,
    )


def _run_settings(checkpoint: Path, config: Path) -> tuple[Mapping[str, Any], Path]:
    """``model`` in the configuration of a run, or else in its checkpoint, and the file that it was read from."""
    if config.is_file():
        from grpo_pl.config.objects import read_tree

        tree = read_tree(config)
        tuned = "rows" in _field(tree, "data", dict, config, default={})  # by `grpo-pl sft`, which asks for no rewards
        return {**({"rewards": []} if tuned else {}), **_field(tree, "model", dict, config)}, config
    from grpo_pl.files.sharded_checkpoints import read_checkpoint

    settings = _field(read_checkpoint(checkpoint), SETTINGS, dict, checkpoint, default={})
    if not settings:
        raise NoSettings(
            f"{checkpoint} holds no settings of its run, and {config} is missing: its rewards are unknown."
        )
    return settings, checkpoint


def _settings(tree: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Settings that an export and the configuration of a run hold in the same form."""
    rewards = _field(tree, "rewards", list, file)
    environment = _field(tree, "environment", dict, file, default={})
    for spec in [*rewards, *([environment] if environment else [])]:
        if not isinstance(spec, dict) or not isinstance(spec.get("init_args") or {}, dict):
            raise ValueError(f"{file}: {spec!r:.60} is no class_path with its init_args.")
    return {
        "rewards": rewards,
        "environment": environment or None,
        "episodes": _field(tree, "episodes", dict, file, default={}),
        "algorithm": _field(tree, "algorithm", dict, file, default={}),
    }


def _field(tree: Mapping[str, Any], name: str, kind: type, file: Path, *, default: Any = None) -> Any:
    """``tree[name]``, or ``default`` where there is nothing."""
    value = tree.get(name, default)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{file} has no {name}, which must be {_KINDS[kind]}.")
    if not isinstance(value, kind):
        raise ValueError(f"{file}: {name} must be {_KINDS[kind]}, got {value!r:.60}.")
    return value


def _build(kind: Callable[..., T], values: Mapping[str, Any], name: str, file: Path) -> T:
    """An object of ``kind`` from fields in a file, which may be a stranger's."""
    from grpo_pl.config.objects import build

    for key, value in values.items():
        parts = value if isinstance(value, list) and key == "examples" else [value] if key in _NESTED else []
        named = key == "class_path" or not is_plain({key: value})  # a dotted key would name the class of a field
        if named or any(not isinstance(p, dict | None) or "class_path" in (p or {}) for p in parts):
            # a text would be read as the name of a file with the fields
            raise ValueError(f"{file}: {name}.{key} must hold fields alone, got {value!r:.60}.")
    try:
        return build(kind, values, name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except TypeError as error:  # of null, which the parser lets pass everywhere
        empty = [key for key, value in values.items() if value is None]
        raise ValueError(f"{file}: {name}: {error}" + (f"; null is {', '.join(empty)}." if empty else ".")) from error


def _examples(run: Path) -> Sequence[Mapping[str, Any]]:
    """Those of the run of an export or a checkpoint; an export that was moved away has none, because problems of
    others' data are not ours to publish with it."""
    found = _field(_run_record(run), "examples", list, run / RECORD, default=[])
    for example in found:
        if not isinstance(example, dict) or not isinstance(example.get("problem"), str):
            raise ValueError(f"{run / RECORD}: an example needs a problem, got {example!r:.60}.")
    return tuple(found)


def _compute(run: Path) -> dict[str, Any]:
    """``precision`` and ``decoder`` of a run since it last began or was resumed."""
    record, file = _run_record(run), run / RECORD
    for start in reversed([record, *_field(record, "resumed", list, file, default=[])]):
        if isinstance(start, dict) and start.get("compute"):
            compute = _field(start, "compute", dict, file)
            return {name: _field(compute, name, str, file, default="") for name in ("precision", "decoder")}
    return {}


def _run_record(run: Path) -> Mapping[str, Any]:
    """The record in the folder of a run; empty if there is no run."""
    record = run / RECORD
    return read_object(record) if record.is_file() else {}


def _kernels_of(name: str, settings: Mapping[str, Any]) -> list[Any]:
    """What the settings in ``name`` ask for in ``attn_implementation``; refuses those that name a module to import."""
    for key in ("auto_map", "auto_mapping", "megatron_config", "megatron_core"):
        if settings.get(key) not in (None, {}, _HARMLESS.get(key)):
            raise Untrusted(f"{name} names code in {key!r}: it needs {FLAG}.")
    return [value for key, value in settings.items() if key.strip("_") == "attn_implementation"]


def _cached_config(base: str) -> Mapping[str, Any]:
    """The config of a model of the hub, as the cache of this machine has it."""
    from transformers import PreTrainedConfig

    try:
        config: Mapping[str, Any] = PreTrainedConfig.get_config_dict(base, local_files_only=True)[0]
    except (OSError, ValueError) as error:  # not in the cache, or no name that the hub could have
        raise Untrusted(
            f"the base model {base!r} may name code, and its config is not here to be checked: download it first "
            f"(hf download {base}), or give {FLAG}."
        ) from error
    return config


def refuse_code(model: ServedModel) -> None:
    """Refuses settings by which ``transformers`` or ``peft`` would import a module or fetch a kernel by name.

    Raises:
        Untrusted: names the file and the setting.
    """
    kernels = {"": [model.policy.attn_implementation, (model.policy.from_scratch or {}).get("attn_implementation")]}
    if model.checkpoint is None:
        for file in (model.source / "config.json", model.source / ADAPTERS):
            kernels[str(file)] = _kernels_of(str(file), read_object(file) if file.is_file() else {})
        base = base_of(str(model.source))  # itself, unless the folder holds adapters
        if Path(base).is_dir():
            file = Path(base) / "config.json"
            kernels[str(file)] = _kernels_of(str(file), read_object(file) if file.is_file() else {})
        else:
            kernels[base] = _kernels_of(f"the base model {base!r}", _cached_config(base))
    for name, values in kernels.items():
        for value in values:
            if value is not None and value not in ATTENTION:
                raise Untrusted(f"{name or 'the policy'} asks for the kernel {value!r} in attn_implementation: {FLAG}.")
