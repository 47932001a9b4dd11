"""Checkpoints on disk: written atomically, sealed when complete, and read without running pickled code."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from grpo_pl.files.rows import read_object
from grpo_pl.files.writing import DeferredErrorFile, staged

T = TypeVar("T")

LAST = "last.ckpt"
"""Link to the newest checkpoint of a run."""
PATTERN = "rollout-*.ckpt"
META = "meta.pt"
"""Inside a sharded checkpoint, which is a folder: everything that is not a sharded tensor."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or must not be read; the message says what to do."""


def checkpoint_path(folder: Path, rollouts: int) -> Path:
    """The file of the state after ``rollouts`` completed rollouts."""
    return folder / f"rollout-{rollouts:06d}.ckpt"


def rollouts_of(path: Path) -> int:
    """The number in a checkpoint's name."""
    match = re.fullmatch(r"rollout-(\d+)\.ckpt", path.name)
    assert match is not None, path
    return int(match[1])


# --- the seal ---------------------------------------------------------------------------------------------------------


def seal(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes the completeness marker beside a checkpoint: ``facts``, and the size (and digest) of each of its files."""
    files = {name: _fingerprint(file) for name, file in _files(path).items()}
    _write_marker(path, {**facts, "files": files})


def annotate(path: Path, facts: Mapping[str, Any]) -> None:
    """Adds ``facts`` to the marker of a sealed checkpoint."""
    known = facts_of(path)
    if known is not None:
        _write_marker(path, {**known, **facts})


def facts_of(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint's marker; None if it has none or an unreadable one."""
    try:
        facts = read_object(_marker(path))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts.get("files"), dict) else None


def broken(path: Path) -> str | None:
    """The reason why a checkpoint is not the whole one that was sealed, else None. Single files are read to the end."""
    facts = facts_of(path)
    if facts is None:
        return "it was never completed"
    files = _files(path)
    for name, expected in facts["files"].items():
        if name not in files:
            return f"{name} is missing"
        if files[name].stat().st_size != expected["bytes"]:
            return f"{name} has {files[name].stat().st_size} of {expected['bytes']} bytes"
    changed = (name for name, expected in facts["files"].items() if _fingerprint(files[name]) != expected)
    return next((f"{name} has changed since it was written" for name in changed), None)


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint under ``folder``; broken ones are passed over with a warning."""
    for path in sorted(folder.glob(PATTERN), key=rollouts_of, reverse=True):
        reason = broken(path)
        if reason is None:
            return path
        warn(f"{path} is passed over: {reason}.")
    return None


def newest_sealed(folder: Path) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint with the highest number that has been completed, and its marker; names that do not match
    ``rollout-NUMBER.ckpt`` are passed over."""
    found = [path for path in folder.glob(PATTERN) if path.stem.removeprefix("rollout-").isdecimal()]
    for path in sorted(found, key=rollouts_of, reverse=True):
        if (facts := facts_of(path)) is not None:
            return path, facts
    return None, None


def remove(path: Path) -> None:
    """Deletes a checkpoint, its marker first, so that an interrupted deletion leaves nothing that looks whole."""
    _marker(path).unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _marker(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_marker(path: Path, facts: Mapping[str, Any]) -> None:
    with staged(_marker(path)) as file:
        file.write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {file.name: file for file in sorted(path.iterdir())}
    return {path.name: path} if path.exists() else {}


def _fingerprint(file: Path) -> dict[str, Any]:
    """Size, and a digest; not for the tensors of a sharded checkpoint, which one process should not have to read."""
    fingerprint: dict[str, Any] = {"bytes": file.stat().st_size}
    if file.suffix != ".distcp":
        with file.open("rb") as stream:
            fingerprint["blake2b"] = hashlib.file_digest(stream, hashlib.blake2b).hexdigest()
    return fingerprint


# --- writing and reading ----------------------------------------------------------------------------------------------


def save_tensors(state: Any, path: Path, *, shared: bool = False) -> None:
    """``torch.save``, whole or not at all.

    Args:
        shared: other processes may write the same file at the same time.

    Raises:
        OSError: the disk is full, or another reason of the system's.
    """
    with staged(path, shared=shared) as staging, DeferredErrorFile(staging) as file:
        torch.save(state, file)


def read_file(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """A single-file checkpoint, on the CPU. Nothing but tensors and plain values is ever built from it.

    Raises:
        CheckpointError: the file is missing, truncated or corrupted, or holds other objects.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it is no checkpoint, or it holds objects other than tensors and plain values, which "
            "could run code when read."
        ) from error
    except Exception as error:  # untrusted bytes can fail in any way
        raise CheckpointError(f"{path} cannot be read: it is truncated or corrupted. Take an earlier one.") from error
    if not isinstance(state, dict) or ("state_dict" not in state and path.name != META):
        raise CheckpointError(f"{path} is not a checkpoint of a run.")
    return state


def policy_weights(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The policy's own state dict inside a checkpoint."""
    return _of_policy(checkpoint["state_dict"])


def _of_policy(entries: Mapping[str, T]) -> dict[str, T]:
    prefix = "policy."
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
