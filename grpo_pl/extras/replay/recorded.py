"""``RecordedRun``: what a run folder holds of a run, and what of it can be played again."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

import grpo_pl
from grpo_pl.callbacks.record import processor_name, versions
from grpo_pl.config.objects import ConfigError
from grpo_pl.files.checkpoints import PATTERN, broken, rollouts_of
from grpo_pl.files.rows import Row, read_lines, read_object
from grpo_pl.files.runs import RunFolder, read_settings, runs_of_name
from grpo_pl.rewards.trust import (
    FLAG,
    Untrusted,
    check_environment_trusted,
    check_rewards_trusted,
    check_source_trusted,
    is_plain,
)

RUN_REWARDS = "--run-rewards"
CLOCKS = ("step_time", "time/")
"""Columns of ``metrics.csv`` that no two runs share."""


class CannotReplay(ConfigError):
    """A run, a step or an export that cannot be played again or proved; the message is one line that says what to
    do."""


class CannotBegin(CannotReplay):
    """A run that cannot begin here, as its data, a file or a package is gone or other; nothing is said of the run."""


@dataclass(frozen=True)
class RecordedRun:
    """A run folder that is read and never written."""

    folder: RunFolder

    @classmethod
    def open(cls, run: str | Path, runs_dir: str | Path = "runs") -> RecordedRun:
        """The run of a folder, or of a name under ``runs_dir``.

        Raises:
            CannotReplay: there is none, there are several of that name, or it is no run of ``grpo-pl fit`` that this
                version reads.
        """
        path = Path(run)
        if path.is_file():
            raise CannotReplay(f"{path} is a file: give the folder of its run, such as runs/quickstart.")
        if not path.is_dir():
            named = runs_of_name(Path(runs_dir), str(run)) if len(path.parts) == 1 else []
            if not named:
                raise CannotReplay(f"there is no run {str(run)!r}: give its folder, such as runs/quickstart.")
            if len(named) > 1:
                folders = " and ".join(str(folder.path) for folder in named)
                raise CannotReplay(f"{folders} are runs of the name {str(run)!r}: give the folder of one.")
            path = named[0].path
        found = cls(RunFolder(path))
        found._check()
        return found

    def _check(self) -> None:
        for file in (self.folder.config, self.folder.record, self.folder.metrics):
            if not file.is_file():
                raise CannotReplay(
                    f"{self.path} has no {file.name}: give the folder of a run that grpo-pl fit has begun; one that "
                    "was made in Python is repeated by its script alone."
                )
        if not {"source"} <= (self.settings.get("data") or {}).keys() or "rewards" not in self.settings["model"]:
            raise CannotReplay(f"{self.path} is no run of GRPO: only such a run can be replayed.")
        self._read(self.folder.record, lambda: (self.processes, self.threads, self.surroundings_changed()))
        theirs, ours = str(self.versions.get("grpo_pl", "")), grpo_pl.__version__
        if theirs.split(".")[:2] not in (ours.split(".")[:2], ["0", "3"]):
            raise CannotReplay(
                f"{self.path} was made by grpo_pl {theirs or 'of an unknown version'}, and this is {ours}: install "
                "that version to replay it."
            )
        self._read(self.folder.digests, lambda: (self.digests, self.token_digests))
        self._read(self.folder.metrics, lambda: (self.metrics, self.seconds))
        fields, rows = ("prompt_id", "sample", "completion"), self.completions(0, self.completed)
        self._read(self.folder.completions, lambda: [row[name] for row in rows for name in fields])

    def _read(self, file: Path, read: Callable[[], object]) -> None:
        """Refuses a file that no run has written, before anything is made of it."""
        try:
            read()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CannotReplay(
                f"{file} is not what a run writes ({why}): put back the file that the run wrote."
            ) from error

    @property
    def path(self) -> Path:
        return self.folder.path

    @cached_property
    def config(self) -> str:
        """The text of ``config.yaml``."""
        return self.folder.config.read_text(encoding="utf-8")

    @cached_property
    def settings(self) -> dict[str, Any]:
        try:
            tree = read_settings(self.config)
        except yaml.YAMLError as error:
            raise CannotReplay(f"{self.folder.config} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(tree, dict) or not all(
            isinstance(tree.get(key), dict) for key in ("model", "data", "trainer")
        ):
            raise CannotReplay(f"{self.folder.config} is no configuration of a run.")
        return tree

    @cached_property
    def facts(self) -> dict[str, Any]:
        """``run.json``."""
        return read_object(self.folder.record)

    @cached_property
    def last_start(self) -> Mapping[str, Any]:
        """What ``run.json`` says of the process that began or last resumed the run."""
        return {**self.facts, **([{}, *self.facts.get("resumed", [])][-1])}

    @property
    def versions(self) -> Mapping[str, Any]:
        return dict(self.last_start.get("versions") or {})

    @property
    def earlier(self) -> bool:
        """True of a run that kept no digests, as of version 0.3: it is held to rewards, completions and gradients."""
        return not self.folder.digests.is_file()

    @property
    def data_digest(self) -> str | None:
        """Of the problems when the run began; None of version 0.3, which read files otherwise."""
        found = None if self.earlier else (self.facts.get("data") or {}).get("digest")
        return None if found is None else str(found)

    @property
    def processes(self) -> int:
        return int(self.facts.get("processes", 1))

    @property
    def threads(self) -> int | None:
        """Threads of each process; None of version 0.3."""
        found = (self.last_start.get("compute") or {}).get("threads")
        return None if found is None else int(found)

    @cached_property
    def digests(self) -> dict[int, str]:
        """Completed rollouts -> digest of the policy's weights."""
        return self.folder.weights_digests()

    @cached_property
    def token_digests(self) -> dict[tuple[int, int, int], str]:
        """Step, prompt and sample -> digest of the token ids of a recorded completion; empty if the run kept none."""
        lines = read_lines(self.folder.digests, may_be_cut_short=True) if self.folder.digests.is_file() else ()
        return {
            (line.row["step"] - 1, prompt_id, sample): digest
            for line in lines
            for prompt_id, digests in line.row.get("token_ids", [])
            for sample, digest in enumerate(digests)
        }

    @cached_property
    def metrics(self) -> dict[int, Row]:
        """Step (from 0) -> what the run logged of it, as the text of each cell that is not empty, without times."""
        found: dict[int, Row] = {}
        with self.folder.metrics.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                step = int(row["step"]) - 1
                kept = {
                    name: cell
                    for name, cell in row.items()
                    if cell and name != "step" and not str(name).startswith((*CLOCKS, "val/"))
                }
                if "reward" in kept:
                    found[step] = kept
        return found

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Step -> wall time that it took."""
        with self.folder.metrics.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row.get("step_time")]
        return {int(row["step"]) - 1: float(row["step_time"]) for row in rows}

    @property
    def completed(self) -> int:
        """Rollouts that the run has made."""
        return max(self.metrics, default=-1) + 1

    @property
    def started_from(self) -> Path | None:
        """The checkpoint that the run was given at its start, as a branch is; None if it began with its own."""
        given = self.settings.get("ckpt_path")
        return None if given is None else Path(given)

    @property
    def start(self) -> int:
        """Completed rollouts at the run's start."""
        return 0 if self.started_from is None else min([*self.digests, *self.metrics], default=0)

    def completions(self, first: int, end: int) -> Iterator[Row]:
        """Recorded completions of the steps ``first`` … ``end`` − 1."""
        if self.folder.completions.is_file():
            for line in read_lines(self.folder.completions, may_be_cut_short=True):
                if first <= line.row["step"] < end:
                    yield line.row

    def completions_edited(self) -> bool | None:
        """Whether ``completions.jsonl`` is other than when the run closed it; None where no digest of it is there."""
        lines = read_lines(self.folder.digests, may_be_cut_short=True) if self.folder.digests.is_file() else ()
        recorded = [line.row["completions"] for line in lines if "completions" in line.row]
        if not recorded:
            return None
        if not self.folder.completions.is_file():
            return True
        with self.folder.completions.open("rb") as file:
            return hashlib.file_digest(file, hashlib.sha256).hexdigest() != recorded[-1]

    def checkpoints(self) -> dict[int, Path]:
        """Completed rollouts -> checkpoint, of those in the run folder."""
        return {rollouts_of(path): path for path in sorted(self.folder.checkpoints.glob(PATTERN))}

    def check_step(self, step: int) -> None:
        """Refuses a step that the run has not come to."""
        if not self.start <= step <= self.completed:
            begun = "" if self.started_from is None else f" from {self.started_from} on"
            raise CannotReplay(
                f"step {step} of {self.path}: it made {self.completed - self.start} rollouts{begun}, so give "
                f"{self.start} (its start) … {self.completed} (its end)."
            )

    def check_completions(self) -> None:
        """Refuses completions that somebody has edited, since a replay is held to them."""
        if self.completions_edited():
            raise CannotReplay(
                f"{self.folder.completions} is not as the run closed it (digests.jsonl has another digest): put back "
                "the file that the run wrote."
            )

    def identity(self) -> str:
        """Names the run by its settings, its start and the surroundings on which its bits depend."""
        parts = {
            "config": self.config,
            "started": self.facts.get("started"),
            "start": self.digests.get(0),
            "versions": self.versions,
            "processes": self.processes,
            "threads": self.threads,
        }
        return hashlib.sha256(json.dumps([parts, here()], sort_keys=True, default=str).encode()).hexdigest()[:20]

    def surroundings_changed(self) -> list[str]:
        """What the bits of a run depend on and is other here than there: one entry each."""
        there = {
            **{name: str(self.versions.get(name, "unknown")) for name in versions()},
            "processor": (self.last_start.get("machine") or {}).get("processor", "unknown"),
        }
        return [f"{name} {there[name]} there, {value} here" for name, value in here().items() if there[name] != value]

    def check_trusted(self, run_rewards: bool) -> None:
        """Refuses to run code of the user's own, or a judge that may cost money, unless asked to; imports nothing.

        Raises:
            CannotReplay: names it and the option.
        """
        if run_rewards:
            return
        tree = self.settings
        model, data, trainer = tree["model"], tree["data"], tree["trainer"]
        try:
            if not is_plain(tree):
                raise Untrusted(f"{self.folder.config} has keys that may name code: that needs {FLAG}.")
            check_rewards_trusted(model["rewards"])
            watch = [spec for spec in (tree.get("watch") or {}).values() if isinstance(spec, Mapping)]
            check_rewards_trusted(watch)
            if model.get("environment") is not None:
                check_environment_trusted(model["environment"])
            for source in (data["source"], *(data.get("validation_sets") or {}).values()):
                check_source_trusted(source)
            others = {key: value for key, value in model.items() if key not in ("rewards", "environment")}
            for name, part in (("model", others), ("trainer", trainer)):
                for key, value in part.items():
                    _check_ours(value, f"{name}.{key}", key)
        except Untrusted as error:
            raise CannotReplay(f"{self.path}: {str(error).replace(FLAG, RUN_REWARDS)}") from error


_PARTS = ("engine", "callbacks", "plugins", "terms", "logger", "profiler")
"""Fields in which a text is the name of a class."""


def _check_ours(value: Any, where: str, name: str) -> None:
    """Refuses a class that is neither ours nor Lightning's, at any depth."""
    if isinstance(value, Mapping):
        path = value.get("class_path")
        if path is not None and not str(path).startswith(("grpo_pl.", "lightning.pytorch.")):
            raise Untrusted(f"{where} is of the class {path!r}: that needs {FLAG}.")
        for key, inner in value.items():
            _check_ours(inner, f"{where}.{key}", "" if name not in _PARTS else name if path is None else "")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_ours(inner, where, name)
    elif isinstance(value, str) and "." in value and (name in _PARTS or name == "strategy"):
        raise Untrusted(f"{where} is {value!r}, which may name a class: that needs {FLAG}.")


def here() -> dict[str, str]:
    """Versions and processor of this process."""
    return {**versions(), "processor": processor_name()}


def whole_checkpoints(found: Mapping[int, Path], step: int) -> Iterator[tuple[int, Path]]:
    """Checkpoints at or before ``step`` that are whole, the nearest first."""
    for rollouts in sorted((n for n in found if n <= step), reverse=True):
        if broken(found[rollouts]) is None:
            yield rollouts, found[rollouts]


def given_settings(config: str) -> str:
    """The text of a ``config.yaml`` that begins a run of its own: neither resumed nor from a checkpoint."""
    text = re.sub(r"^resume: .*$", "resume: false", config, flags=re.MULTILINE)
    return re.sub(r"^ckpt_path: .*$", "ckpt_path: null", text, flags=re.MULTILINE)


def threads_of(run: RecordedRun) -> int:
    """Threads to replay a run with."""
    return run.threads or torch.get_num_threads()
