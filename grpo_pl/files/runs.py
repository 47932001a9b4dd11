"""Run folders: ``runs/<name>``, never overwritten; the files inside one, and how one is resumed."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from grpo_pl.files.checkpoints import LAST, newest_whole
from grpo_pl.files.locks import FolderLock
from grpo_pl.files.rows import read_lines, read_object
from grpo_pl.files.writing import staged
from grpo_pl.moved import defined_name

IMAGES = "images"
"""Folder of a run with a small PNG of each image that its ``completions.jsonl`` names."""
HELD_OUT_IMAGES = f"{IMAGES}/held_out"
"""The same of ``held_out.jsonl``."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


def read_settings(text: str) -> Any:
    """The values of a ``config.yaml``."""
    return yaml.load(text, Loader=_LOADER)


class RunFolder:
    """The files inside one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.completions = path / "completions.jsonl"
        self.images = path / IMAGES
        self.held_out_images = path / HELD_OUT_IMAGES
        self.digests = path / "digests.jsonl"
        self.suspicious = path / "suspicious.jsonl"
        self.held_out = path / "held_out.jsonl"
        self.record = path / "run.json"
        self.branch = path / "branch.json"
        self.made_by = path / ".name"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.last_checkpoint = self.checkpoints / LAST
        self.export = path / "export"

    def weights_digests(self) -> dict[int, str]:
        """Completed rollouts -> digest of the policy's weights, where the run wrote one; nothing of version 0.3.

        Raises:
            ValueError: a line is no row.
        """
        lines = read_lines(self.digests, may_be_cut_short=True) if self.digests.is_file() else ()
        return {line.row["step"]: line.row["weights"] for line in lines if "weights" in line.row}

    def discard_if_unused(self) -> None:
        """Removes the folder unless something was measured or saved in it."""
        if not self.metrics.exists() and not self.checkpoints.exists():
            shutil.rmtree(self.path, ignore_errors=True)


def claim_run_folder(root: Path, name: str) -> RunFolder:
    """Creates ``root/name``, or ``root/name-2``, ``-3`` … where that exists already.

    ``mkdir`` is atomic, so two runs started together get two folders.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"--runs_dir {root} cannot be a folder: a file of that name is in the way.") from error
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path)
    raise AssertionError("count() does not end")


def check_name(name: str) -> None:
    """Refuses names that would lead out of the folder of runs."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"--name must be the name of a folder, without slashes, got {name!r}; --runs_dir says where.")


@dataclass(frozen=True)
class OpenRun:
    """A run folder and, where an earlier process left one, the checkpoint to go on from.

    The end of a ``with`` block frees the lock, and after an error removes a folder without any result.
    """

    folder: RunFolder
    checkpoint: Path | None = None
    note: str = ""
    """To print once the run can start."""
    lock: FolderLock | None = None
    """Held by the one process that writes there."""

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.lock is None:
            return
        if error is not None:
            self.folder.discard_if_unused()
        self.lock.release()


def start_run(root: Path, name: str, config: str | None, *, first: bool) -> OpenRun:
    """Claims a folder of its own for a run and writes its resolved configuration there, if it has one.

    Args:
        first: false in all processes but one, which touch nothing; the checkpoint callback tells them the folder.
    """
    if not first:
        return OpenRun(RunFolder(root / name))
    folder = claim_run_folder(root, name)
    lock = _locked(folder)
    folder.made_by.write_text(name, encoding="utf-8")
    if config is not None:
        _write_config(folder, config)
    note = "" if folder.path.name == name else f"{root / name} exists; this run is {folder.path}."
    return OpenRun(folder, note=note, lock=lock)


def resume_run(root: Path, name: str, config: str | None, *, first: bool) -> OpenRun:
    """The newest run of that name, to go on from its last whole checkpoint; a new one where there is none, so that a
    job that is started again and again needs one command only. Says which settings differ from those so far.

    Raises:
        ValueError: another process works on that run.
    """
    folder = newest_run_folder(root, name)
    if folder is None:
        return start_run(root, name, config, first=first)
    lock = _locked(folder) if first else None

    def say(line: str) -> None:
        if first:
            print(line, file=sys.stderr)

    checkpoint = newest_whole(folder.checkpoints, say)
    start = "its beginning, for it has no whole checkpoint" if checkpoint is None else checkpoint.name
    say(f"going on with {folder.path} from {start}.")
    changes = [] if config is None else config_changes(_config_so_far(folder), read_settings(config))
    if changes:
        say("changed: " + "; ".join(changes))
    return OpenRun(folder, checkpoint, lock=lock)


def keep_config(folder: RunFolder, config: str) -> None:
    """Writes the resolved configuration of a resumed run; an earlier one that differs is kept under another name."""
    if folder.config.exists() and folder.config.read_text(encoding="utf-8") == config:  # as in every new run
        return
    before = _config_so_far(folder)
    if config_changes(before, read_settings(config)):
        if before:
            number = next(n for n in count(1) if not (folder.path / f"config.{n}.yaml").exists())
            shutil.copyfile(folder.config, folder.path / f"config.{number}.yaml")
        _write_config(folder, config)


def _write_config(folder: RunFolder, config: str) -> None:
    with staged(folder.config) as file:
        file.write_text(config, encoding="utf-8")


def _locked(folder: RunFolder) -> FolderLock:
    lock = FolderLock(folder.path)
    reason = lock.take()
    if reason:
        print(f"{folder.path} cannot be locked ({reason}): see that no second run goes on there.", file=sys.stderr)
    return lock


def _config_so_far(folder: RunFolder) -> dict[str, Any]:
    return dict(read_settings(folder.config.read_text(encoding="utf-8")) or {}) if folder.config.exists() else {}


def newest_run_folder(root: Path, name: str) -> RunFolder | None:
    """The last claimed of ``root/name``, ``root/name-2`` … that a run of this very name made; None if there is none."""
    return next(iter(runs_of_name(root, name)), None)


def runs_of_name(root: Path, name: str) -> list[RunFolder]:
    """Those of ``root/name``, ``root/name-2`` … that a run of this very name made, the last claimed first."""
    numbers = {1: root / name} if (root / name).is_dir() else {}
    for path in root.glob(f"{glob.escape(name)}-*") if root.is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"-([1-9]\d*)", path.name)
        if match is not None and path.is_dir():
            numbers[int(match[1])] = path
    found = []
    for number in sorted(numbers, reverse=True):
        folder = RunFolder(numbers[number])
        made_by = _name_of_run(folder)
        if made_by is None:  # numbers are claimed in order, so a gap is a sign of a run that was given this name
            made_by = name if number == 1 or number - 1 in numbers else folder.path.name
        elif not re.fullmatch(re.escape(made_by) + r"(-[1-9]\d*)?", folder.path.name):
            made_by = folder.path.name  # it was copied or renamed since
        if made_by == name:
            found.append(folder)
    return found


def _name_of_run(folder: RunFolder) -> str | None:
    """The name of the run that made a folder; None where nothing tells, as in some of version 0.3 and before."""
    try:
        if folder.made_by.exists():
            return folder.made_by.read_text(encoding="utf-8")
        if (name := _config_so_far(folder).get("name")) is not None:  # given in a YAML file or by --name
            return str(name)
        words = shlex.split(read_object(folder.record)["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None
    given: dict[str, list[str]] = {"--name": [], "--config": []}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in given:
            given[flag].append(value if equals else following)
    return given["--name"][-1] if given["--name"] else Path(given["--config"][0]).stem if given["--config"] else None


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One entry ``key: old → new`` for every setting that differs between two resolved configurations."""
    old, new = flat_settings(before), flat_settings(now)
    keys = [*old, *(key for key in new if key not in old)]
    others = ("config", "resume", "ckpt_path", "name", "runs_dir", "model.compute")  # the last one of earlier versions
    return [
        f"{key}: {old.get(key, 'unset')} → {new.get(key, 'unset')}"
        for key in keys
        if old.get(key) != new.get(key) and key not in others
    ]


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A resolved configuration as ``model.optimization.lr`` … -> value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            flat |= flat_settings(dict(enumerate(value)), f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            flat[f"{prefix}{key}"] = defined_name(value) if key == "class_path" else value
    return flat
