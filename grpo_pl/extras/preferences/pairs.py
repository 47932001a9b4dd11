"""Pairs of completions of one prompt of which one is preferred: from a file, or made up."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts, worked_lines
from grpo_pl.files.rows import Row, parsed_lines
from grpo_pl.functional.argument_checks import check_at_least, check_within
from grpo_pl.functional.sampling import row_key


class Preference(NamedTuple):
    """Two completions of one prompt; as texts, the prompt as the policy reads it."""

    prompt: str
    chosen: str
    """The better one."""
    rejected: str


def read_preferences(path: str | Path, *, skip: int = 0, may_be_cut_short: bool = False) -> list[Preference]:
    """Reads JSON Lines with ``prompt``, ``chosen`` and ``rejected``: texts, or lists of chat messages, of which the
    contents are joined by newlines, as TRL's ``RewardTrainer`` reads them as well. Other keys are ignored.

    Args:
        skip: rows at the beginning that are left out.
        may_be_cut_short: leave out a last line that lacks its newline, which somebody may be writing.

    Raises:
        ValueError: no such file, or a line that is no such pair or whose completions are equal, by its number.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"preferences: no such file: {file}")
    return list(parsed_lines(file, _preference, skip=skip, may_be_cut_short=may_be_cut_short))


def _preference(row: Row) -> Preference:
    names = ("prompt", "chosen", "rejected")
    if lacking := [name for name in names if row.get(name) is None]:
        raise ValueError(f"a pair needs prompt, chosen and rejected; there is no {' and no '.join(lacking)}.")
    pair = Preference(*(_text(name, row[name]) for name in names))
    if pair.chosen == pair.rejected:
        raise ValueError(f"chosen and rejected are equal, {pair.chosen[:60]!r}: nothing is preferred.")
    return pair


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in value):
        return "\n".join(message["content"] for message in value)
    raise ValueError(f"{name} must be a text or a list of messages, got {value!r:.60}.")


class PairSource(ABC):
    """Pairs to train a reward model on, and held-out ones."""

    @abstractmethod
    def training(self) -> list[Preference]:
        """All pairs to train on, in a fixed order."""

    @abstractmethod
    def held_out(self) -> list[Preference]:
        """Pairs whose prompts are in no training pair."""


@dataclass(kw_only=True)
class PreferenceFile(PairSource):
    """Pairs of a JSON Lines file with ``prompt``, ``chosen`` and ``rejected``."""

    path: str
    """The file."""
    val_path: str | None = None
    """File of held-out pairs; null holds out ``val_share`` of the prompts of ``path``."""
    val_share: float = 0.1
    """Share of the prompts that is held out, chosen by a hash of the prompt."""

    def __post_init__(self) -> None:
        check_within("(0, 1)", "data.pairs", val_share=self.val_share)

    def training(self) -> list[Preference]:
        return self._parts[0]

    def held_out(self) -> list[Preference]:
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[list[Preference], list[Preference]]:
        parts: tuple[list[Preference], list[Preference]] = ([], [])
        for pair in read_preferences(self.path):
            if self.val_path is None and row_key("held out", pair.prompt) % 10_000 < 10_000 * self.val_share:
                parts[1].append(pair)
            else:
                parts[0].append(pair)
        if self.val_path is not None:
            parts[1].extend(read_preferences(self.val_path))
            if shared := {pair.prompt for pair in parts[0]} & {pair.prompt for pair in parts[1]}:
                raise ValueError(
                    f"{len(shared)} prompts of {self.val_path} are in {self.path} as well, such as "
                    f"{min(shared)[:60]!r}: hold out others."
                )
        for what, part, path in zip(
            ("training", "held-out"), parts, (self.path, self.val_path or self.path), strict=True
        ):
            if not part:
                raise ValueError(f"{path} holds no {what} pairs: add some, or change val_share or val_path.")
        return parts


@dataclass(kw_only=True)
class BrevityPreferences(PairSource):
    """Made-up pairs: of two answers to a sum the one with fewer lines of thought is preferred, be it right or wrong."""

    count: int = 4000
    """Training pairs."""
    val_count: int = 500
    """Held-out pairs."""
    seed: int = 0
    """Names the pairs."""

    def __post_init__(self) -> None:
        check_at_least(1, "data.pairs", count=self.count, val_count=self.val_count)

    def training(self) -> list[Preference]:
        return list(self._pairs("train", self.count))

    def held_out(self) -> list[Preference]:
        return list(self._pairs("val", self.val_count))

    def _pairs(self, split: str, count: int) -> Iterator[Preference]:
        source = ArithmeticPrompts(digits=3, min_digits=3, seed=self.seed)
        rng = random.Random(row_key(self.seed, "preferences", split))
        problems = source.validation(count) if split == "val" else source.prompts(0, count=count)
        for problem in problems:
            lines = worked_lines(problem)
            few, many = sorted(rng.sample(range(len(lines) + 1), 2))
            texts = []
            for shown in (few, many):
                answer = int(problem.answer) + rng.choice((0, 0, 1, -1, 10))
                work = "".join(f"{line}\n" for line in lines[:shown])
                texts.append(f"<think>{work}</think><answer>\\boxed{{{answer}}}</answer>")
            yield Preference(problem.question, *texts)
