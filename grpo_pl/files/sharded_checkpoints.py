"""Sharded checkpoints: a folder with every rank's part of each tensor, and metadata."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from grpo_pl.files.checkpoints import LAST, META, CheckpointError, _of_policy, read_file, save_tensors
from grpo_pl.files.writing import DeferredErrorFile

_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # the folder it was written to
    ("pathlib._local", "PosixPath"),
}
"""Classes that the index of a sharded checkpoint consists of."""


def write_sharded(folder: Path, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
    """Writes nested ``tensors``, DTensors among them, and from rank 0 ``meta``. Every rank calls it with one folder.

    Raises:
        OSError: a rank could not write its part; on every rank.
    """
    writer = FileSystemWriter(str(folder), sync_files=True)
    writer.fs = _DeferredErrorFileSystem()
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as error:
        causes = [wrapped[0] for wrapped in error.failures.values()]
        raise next((c for c in causes if isinstance(c, OSError)), OSError(str(causes[0]))) from error
    by_first_process(lambda: save_tensors(meta, folder / META))


def by_first_process(act: Callable[[], Any]) -> None:
    """Calls ``act`` in the first process only; every process calls this function and waits for it.

    Raises:
        OSError: it could not; on every process.
    """
    problem: list[OSError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            problem = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def load_sharded(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Fills nested ``tensors`` in place with each rank's part and returns the meta data. Every rank calls it.

    Raises:
        CheckpointError: files are missing, cut short, or hold what could run code.
    """
    reader, meta = _open(folder)
    try:
        load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise _unreadable(folder, next(iter(error.failures.values()))[0]) from error
    return meta


def read_sharded(folder: Path) -> dict[str, Any]:
    """The same checkpoint put together in one process, as a single-file one would read.

    Raises:
        CheckpointError: see `load_sharded`.
    """
    state: dict[str, Any] = {}
    reader, meta = _open(folder)
    try:
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise _unreadable(folder, next(iter(error.failures.values()))[0]) from error
    groups = meta.pop("optimizer_param_groups")
    # ``Optimizer.load_state_dict`` wants the state by number, not by name
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    optimizer = {
        "state": {number[name]: entry for name, entry in state["optimizer"].items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }
    return {**meta, "state_dict": state["state_dict"], "optimizer_states": [optimizer]}


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the index names.

    Raises:
        CheckpointError: see `load_sharded`.
    """
    reader, _ = _open(folder)
    return {key: tuple(entry.size) for key, entry in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]


class _DeferredErrorFileSystem(FileSystem):
    """Torch's file system, but an error of writing keeps its reason."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DeferredErrorFile(Path(path)) as file:
            yield file


class _SafeReader(FileSystemReader):
    """Torch's own reader unpickles the index without restraint; this one builds nothing but an index of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self._get_metadata_path(kwargs.get("rank"))))
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if any(isinstance(entry, BytesStorageMetadata) for entry in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("the index lists pickled objects")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the index of a checkpoint")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """What ``getattr`` stands for in an index: early versions of Python 3.11 write a member of an enumeration so."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name!r} of {kind!r} does not belong into the index of a checkpoint")
    return kind[name]


def _open(folder: Path) -> tuple[_SafeReader, dict[str, Any]]:
    """A reader whose index has been found to be harmless, and the meta data."""
    reader = _SafeReader(str(folder))
    try:
        reader.read_metadata()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder} is refused: reading it could run code ({error}).") from error
    except (OSError, EOFError, ValueError, AttributeError) as error:
        raise _unreadable(folder, error) from error
    return reader, read_file(folder / META)


def _unreadable(folder: Path, cause: BaseException) -> CheckpointError:
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return CheckpointError(f"{folder} cannot be read: it is truncated or corrupted ({reason}). Take an earlier one.")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of either form with whole tensors on the CPU, in a single process.

    Raises:
        CheckpointError: see `read_file`.
    """
    return read_sharded(path) if _is_sharded(path) else read_file(path)


def _is_sharded(path: Path) -> bool:
    if path.is_dir() and not (path / META).exists():
        last = path / "checkpoints" / LAST
        raise CheckpointError(f"{path} is a folder and no checkpoint." + (f" Give {last}." if last.exists() else ""))
    return path.is_dir()


def read_head(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The shapes of the policy's weights, by name, and what else a checkpoint of either form holds, without reading
    its tensors.

    Raises:
        CheckpointError: see `read_checkpoint`.
    """
    if _is_sharded(path):
        shapes = {key.removeprefix("state_dict."): shape for key, shape in read_shapes(path).items()}
        return _of_policy(shapes), read_file(path / META)
    state = read_file(path, mmap=True)
    return _of_policy({key: tuple(value.shape) for key, value in state.pop("state_dict").items()}), state
