"""``Draft``: what is known of a task before its files are written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task before its source was looked at."""

    kind: str
    """Folder of its templates."""
    title: str
    """What the task is, in a sentence."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What fills ``task.py``."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the source, where they are not its own defaults: they stand in ``config.yaml``."""
    copied: Path | None = None
    """Data file that goes into the folder, and the name it has there."""
    file_name: str = ""
    notes: Sequence[str] = ()
    """What was guessed, as lines to print."""
    config: Mapping[str, object] | None = None
    """What fills ``config.yaml``, where it is not measured on questions and demonstrations."""


def copy_data(drafted: Draft, folder: Path) -> None:
    """The data file into the folder, if it is to be there."""
    if drafted.copied is not None:
        shutil.copyfile(drafted.copied, folder / drafted.file_name)
