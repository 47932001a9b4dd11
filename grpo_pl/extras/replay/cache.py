"""The checkpoints that replays made, in the cache folder, up to a limit; the run folder is never written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.files.cache import cache_root
from grpo_pl.files.checkpoints import PATTERN, checkpoint_path, remove, rollouts_of
from grpo_pl.files.locks import FolderLock

LIMIT_GB = 10.0
"""Size of the folder, unless ``GRPO_PL_REPLAY_GB`` says another."""
_MAKING = "making-"


def replay_root() -> Path:
    """The folder of all replays; it may be deleted at any time."""
    return cache_root() / "replay"


def folder_of(run: RecordedRun) -> Path:
    """The folder of one run's replays, laid out like a run folder."""
    return replay_root() / run.identity()


def made(run: RecordedRun) -> dict[int, Path]:
    """Completed rollouts -> checkpoint, of those that replays have made."""
    return {rollouts_of(path): path for path in sorted((folder_of(run) / "checkpoints").glob(PATTERN))}


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for one replay that is gone when the block ends; what a killed process left behind goes as well.

    Raises:
        CannotReplay: the limit of the cache is no number, which would be found at the replay's end.
    """
    limit_gb()
    root = replay_root()
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_MAKING}*"):
        with_lock = FolderLock(left)
        try:
            with_lock.take()
        except ValueError:  # another process works there
            continue
        with_lock.release()
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_MAKING, dir=root))
    lock = FolderLock(folder)
    try:
        lock.take()
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def keep(run: RecordedRun, checkpoint: Path, step: int) -> Path:
    """Moves a checkpoint that was made into the cache, its marker last, and cleans up."""
    folder = folder_of(run)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(run.config, encoding="utf-8")  # which says what the policy is
    kept = checkpoint_path(folder / "checkpoints", step)
    remove(kept)
    os.replace(checkpoint, kept)
    os.replace(checkpoint.with_suffix(".json"), kept.with_suffix(".json"))
    clean(limit_gb(), but=kept)
    return kept


def limit_gb() -> float:
    """``$GRPO_PL_REPLAY_GB``, or the default.

    Raises:
        CannotReplay: it is no positive number.
    """
    given = os.environ.get("GRPO_PL_REPLAY_GB") or LIMIT_GB
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise CannotReplay(f"GRPO_PL_REPLAY_GB is {given!r}: give gigabytes, such as 10.")
    return limit


def clean(limit: float, *, but: Path) -> None:
    """Deletes the checkpoints that were used longest ago until all take ``limit`` gigabytes at most.

    Args:
        but: stays in any case.
    """
    paths = sorted(replay_root().glob(f"*/checkpoints/{PATTERN}"), key=lambda path: path.stat().st_mtime)
    sizes = {path: size_of(path) for path in paths}
    for path in paths:
        if sum(sizes.values()) <= limit * 1e9:
            return
        if path != but:
            remove(path)
            del sizes[path]
            if not any(path.parent.glob(PATTERN)):
                shutil.rmtree(path.parent.parent, ignore_errors=True)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint, a file or a folder."""
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def size_of_state(run: RecordedRun) -> int:
    """Bytes of a run's largest checkpoint; 0 where it has none."""
    return max(map(size_of, run.checkpoints().values()), default=0)
