"""Run folders: ``runs/<name>``, never overwritten; what lies where inside one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The places inside one run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> Path:
        return self.checkpoints / "last.ckpt"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def discard_if_unused(self) -> None:
        """Removes the folder unless something was measured or saved in it."""
        if not self.metrics.exists() and not self.checkpoints.exists():
            shutil.rmtree(self.path, ignore_errors=True)


def claim_run_folder(root: Path, name: str) -> RunFolder:
    """Creates ``root/name``, or ``root/name-2``, ``-3`` … where that exists already.

    ``mkdir`` is atomic, so two runs started together get two folders.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path)
    raise AssertionError("count() does not end")
