"""Folders in the Hugging Face layout: what is broken in them, and models that are loaded whole or not at all."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_pl.files.hub import offline_without_network
from grpo_pl.files.rows import Row, read_object

MANIFEST = "grpo_pl.json"
"""File in an exported folder with what Hugging Face files do not hold: template, rewards and limits of sampling."""
VERIFIED = "verified.json"
"""File beside it with what ``grpo-pl verify`` compared."""
_CONFIGS = ("config.json", "adapter_config.json")
_GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"
_OBJECTS = (*_CONFIGS, _GENERATION, _INDEX, "tokenizer_config.json", "special_tokens_map.json", MANIFEST)
_CHAT_TEMPLATE = "chat_template.jinja"
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
_NAMED = 3  # tensors in a message
_LONGEST = 400  # characters of an error of a library


def check_folder(folder: Path) -> None:
    """Refuses a local folder whose files cannot be read, by the contents of small files and the headers of large ones.

    Raises:
        ValueError: one line that names the first such file and what is wrong.
        OSError: the system refuses to open one.
    """
    read = {name: read_object(folder / name) for name in _OBJECTS if is_there(folder / name)}
    is_there(folder / "tokenizer.json")
    is_there(folder / _CHAT_TEMPLATE)
    _check_generation(read.get(_GENERATION, {}), folder / _GENERATION)
    if _INDEX in read:
        parts = read[_INDEX].get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
            raise ValueError(f"{folder / _INDEX} has no weight_map from the names of tensors to those of files.")
        for name in sorted(set(parts.values())):
            if not is_there(folder / name):
                raise ValueError(f"{folder / name} is missing, which {_INDEX} names.")
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        is_there(file)
        try:
            with safe_open(file, framework="pt"):
                pass  # its header says how long the file must be
        except SafetensorError as error:
            raise ValueError(
                f"{file} cannot be loaded: it is truncated or no file of safetensors ({error})."
            ) from error


def is_there(file: Path) -> bool:
    """True if there is a file of that name.

    Raises:
        ValueError: there is something else, such as a folder or a link that leads nowhere.
    """
    if file.is_file():
        return True
    if file.is_symlink() and not file.exists():
        raise ValueError(f"{file} is a link to {file.readlink()}, which is missing.")
    if file.exists():
        raise ValueError(f"{file} is {'a folder' if file.is_dir() else 'no regular file'}; a file belongs there.")
    return False


def _check_generation(settings: Row, file: Path) -> None:
    """Refuses settings of generation that ``transformers`` takes as they are and that mean nothing."""
    temperature = settings.get("temperature")
    if temperature is not None and not _is_number(temperature, int | float):
        raise ValueError(f"{file}: temperature must be a number, got {temperature!r}.")
    for name in _TOKENS:
        ids = settings.get(name)
        several = ids if isinstance(ids, list) and name == "eos_token_id" else [ids]
        if ids is not None and not all(_is_number(id_, int) for id_ in several):
            raise ValueError(f"{file}: {name} must be the number of a token, got {ids!r}.")


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@contextmanager
def one_clear_line(source: str, what: str) -> Iterator[None]:
    """Turns every error of loading ``source`` into a ``ValueError`` with one line."""
    folder = Path(source)
    if folder.is_dir() and not any((folder / f"{kind}config.json").exists() for kind in ("", "adapter_", "tokenizer_")):
        raise ValueError(f"cannot load the {what}: {source!r} holds no config.json, so no model.")
    if folder.is_file():
        raise ValueError(f"cannot load the {what}: {source!r} is a file; give the model's folder.")
    if not folder.exists() and source.startswith((".", "/", "~")):
        raise ValueError(f"cannot load the {what}: there is no folder {source!r}.")
    try:
        if folder.is_dir():
            check_folder(folder)
        else:
            offline_without_network()
        yield
    except Exception as error:  # libraries may raise anything on a stranger's files
        where = "that folder" if folder.is_dir() else "of the hub"
        if isinstance(error, OSError) and not folder.is_dir():
            lacking = "the hub cannot be reached" if offline_without_network() else "the hub has no answer"
            where = f"no such folder here, and {lacking}"
        known = isinstance(error, OSError | ValueError)
        reason = " ".join((str(error) if known else f"{type(error).__name__}: {error}").split())
        reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]} …"
        raise ValueError(f"cannot load the {what} {source!r} ({where}): {reason}") from error


# --- models -----------------------------------------------------------------------------------------------------------


def load_pretrained(kind: Any, source: str, *, head: str = "", **options: Any) -> Any:
    """``kind.from_pretrained``, but no weight is left at random: a tensor that is missing or has another shape is
    refused. One that the model has no place for is refused in an export of ours, and else named in a warning. What is
    loaded stays as it is, whatever happens to the files afterwards.

    Args:
        kind: a class of transformers, such as ``AutoModelForCausalLM``.
        source: hub name or local folder.
        head: name of a module, such as ``score``, that may be new if the folder holds a causal language model: the one
            exemption. It is the same at each load, and a warning says that it is random.

    Raises:
        ValueError: one line that names what cannot be loaded.
    """
    if _NOWHERE:  # else a config of a huge model would take the memory for what is missing before it is refused
        check_pretrained(kind, source, head=head)
    model, notes = _loaded(kind, source, head, options)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return model


def check_pretrained(kind: Any, source: str, *, head: str = "") -> None:
    """Refuses what `load_pretrained` would refuse. Where accelerate is installed, as peft has it, by the headers of the
    files, which takes no memory; a model with quantized weights, whose tensors have other forms, waits for its load."""
    from transformers import AutoConfig

    quantized = None
    if not (Path(source) / "adapter_config.json").is_file():
        with one_clear_line(source, "model"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_kind(kind, config)
        quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        _loaded(kind, source, head, _NOWHERE)


def check_kind(kind: Any, config: Any) -> None:
    """Refuses to take an image-text model for one of text, which transformers builds none of."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
    )

    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if kind is AutoModelForCausalLM and reads_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{config.model_type} is an image-text model: set `policy.images: true`.")


_NOWHERE: Mapping[str, Any] = {"device_map": "meta"} if importlib.util.find_spec("accelerate") else {}


def _loaded(kind: Any, source: str, head: str, options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The model, and what its user should know."""
    import torch

    is_ours = (Path(source) / MANIFEST).is_file()
    new_head = torch.random.fork_rng(devices=[], enabled=bool(head))
    with one_clear_line(source, "model"), report_kept() as report, new_head:
        if is_ours and not is_there(Path(source) / _GENERATION):
            raise ValueError(f"{Path(source) / _GENERATION} is missing, which names the tokens that end a completion.")
        if head:
            torch.manual_seed(0)
        try:
            model, found = kind.from_pretrained(
                source,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                trust_remote_code=False,  # a model is data: no code and no pickles of its folder are run
                use_safetensors=True,
                **options,
            )
        except RuntimeError as error:  # it may speak of "the above report"
            raise ValueError(" ".join([str(error), *report])) from error
        for tensor in (*model.parameters(), *model.buffers()):  # one by one: two of them, not two models, are in memory
            if tensor.device.type == "cpu":  # maybe a part of the mapped file, which others may overwrite or cut
                tensor.data = tensor.data.clone()
    name, missing, unexpected = type(model).__name__, set(found["missing_keys"]), set(found["unexpected_keys"])
    is_causal = bool(head) and any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in model.config.architectures or ())
    new = {tensor for tensor in missing if is_causal and tensor.startswith(f"{head}.")}
    if fault := unlike(missing - new, unexpected if is_ours else (), shapes_of(found)):
        raise ValueError(f"cannot load the model {source!r}: its files are not those of a {name}: {fault}.")
    for adapters in getattr(model, "peft_config", {}).values():  # of which alone `found` tells
        base = adapters.base_model_name_or_path
        if base and base != source:
            check_pretrained(kind, base, head=head)
    notes = []
    if new:
        notes.append(f"{source} is a causal language model: {_several(new)} new and random; train it as {name} first.")
    if unexpected and not is_ours:
        notes.append(f"{source}: {_several(unexpected)} in its files, but not part of a {name}; nothing uses that.")
    return model, notes


@contextmanager
def report_kept() -> Iterator[list[str]]:
    """Context manager: within it transformers' table of what was not loaded is kept instead of shown."""
    kept: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = " ".join(record.getMessage().split())
        is_report = " LOAD REPORT" in text or "checkpoint seem corrupted" in text
        kept.extend([text] * is_report)
        return not is_report

    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(keep)
    try:
        yield kept
    finally:
        log.removeFilter(keep)


def shapes_of(found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Shape in the files and in the model of each tensor where they differ."""
    return {name: (theirs, ours) for name, theirs, ours in found["mismatched_keys"]}


def unlike(missing: Iterable[str], unexpected: Iterable[str], different: Mapping[str, Sequence[Any]]) -> str:
    """The faults of a checkpoint's tensors as text; empty if there are none."""
    faults = []
    if missing := list(missing):
        faults.append(f"{_several(missing)} missing")
    if different:
        name = min(different)
        theirs, ours = (str(shape) if isinstance(shape, str) else list(shape) for shape in different[name])
        more = f", and {len(different) - 1} more of another shape" if len(different) > 1 else ""
        faults.append(f"{name} is {theirs} and should be {ours}{more}")
    if unexpected := list(unexpected):
        faults.append(f"{_several(unexpected)} not part of the model")
    return "; ".join(faults)


def _several(names: Iterable[str]) -> str:
    """A few of the names and the number of the others, with a verb."""
    listed = sorted(names)
    more = f" and {len(listed) - _NAMED} more tensors" if len(listed) > _NAMED else ""
    return f"{', '.join(listed[:_NAMED])}{more} {'is' if len(listed) == 1 else 'are'}"
