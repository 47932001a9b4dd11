"""``JsonLinesPrompts``: a JSON Lines file of any size, read line by line from disk when a line's turn comes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any, Literal, overload

from grpo_pl.data.cells import check_pattern, gold_in, is_text, normal_question, note_kept, read_kept
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Prompt

Side = Literal["train", "val"]


@dataclass(kw_only=True)
class JsonLinesPrompts(PromptSource):
    """One line is one problem; of the whole file only where its lines begin stays in memory, 16 bytes a line.

    The file is read once at the start, which checks every line, and then only where a step asks. Steps take the next
    lines of a permutation that seed and epoch determine. Lines with equal questions are held out together.
    For files that fit into memory, and for Parquet, CSV and the hub, there is ``TablePrompts``.
    """

    path: str
    """The file: one JSON object a line, UTF-8."""
    val_path: str | None = None
    """A further file to validate on; null holds out ``val_share`` of the lines."""
    val_share: float = 0.01
    """Share of the lines that is held out where there is no ``val_path``."""
    question: str = "question"
    """Key of the question."""
    answer: str = "answer"
    """Key of the gold answer."""
    answer_pattern: str = ""
    """Regular expression whose first group is the gold answer inside ``answer``, last match; empty takes all of it."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What to do with lines whose answer cannot be read: refuse to start, or leave them out and say how many."""
    kept: str | None = None
    """File that ``grpo-pl filter`` wrote: of the training problems only those in it are taken."""
    seed: int = 0
    """Names the order of the lines, and which are held out."""

    notes: list[str] = field(init=False, default_factory=list, repr=False, compare=False)
    """What was left out while loading, for people to read."""
    _lines: dict[Side, _Lines] | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.val_share < 1.0:
            raise ValueError(f"data.source.val_share must lie in [0, 1), got {self.val_share}.")
        check_pattern(self.answer_pattern)

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Prompt]:
        lines = self.problems("train")
        if len(lines) < count:
            raise ValueError(
                f"{self.path!r} has {len(lines)} training rows and a step asks for {count}: "
                "lower data.prompts_per_step."
            )
        epoch, part = divmod(step, len(lines) // count)
        chosen: dict[int, None] = {}
        for number in range(attempt + 1):  # an attempt takes no line of an earlier one, as long as there are others
            key = row_key(self.seed, "rows", epoch, number)
            if len(lines) - len(chosen) < count:
                chosen.clear()
            order = (permuted(i % len(lines), len(lines), key) for i in count_from(part * count))
            fresh = (i for i in order if i not in chosen)
            picked = [next(fresh) for _ in range(count)]
            chosen.update(dict.fromkeys(picked))
        return [lines[i] for i in picked]

    def validation(self, count: int | None = None) -> list[Prompt]:
        return list(self.problems("val")[:count])

    def problems(self, split: Side) -> _Lines:
        """Lines as a sequence that reads what is asked for; ``Prompt.id`` is the number of the line, from 1."""
        if self._lines is None:
            self._lines = self._load()
        return self._lines[split]

    def leave_out(self, ids: Mapping[Side, Set[int]]) -> None:
        for split, unwanted in ids.items():
            self.problems(split).leave_out(unwanted)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _load(self) -> dict[Side, _Lines]:
        val = _Lines(self, self.val_path or self.path)
        held_out: set[int] = set()
        if self.val_path is not None:
            for number, offset, prompt in self._scan(self.val_path):
                val.add(number, offset)
                held_out.add(row_key(normal_question(prompt.question)))
        wanted = None if self.kept is None else {row_key(question) for question in read_kept(self.kept)}
        train, repeated, unwanted = _Lines(self, self.path), 0, 0
        for number, offset, prompt in self._scan(self.path):
            key = row_key(normal_question(prompt.question))
            if self.val_path is not None:
                repeated += key in held_out
            elif self._is_held_out(key):
                val.add(number, offset)
                continue
            if key in held_out:
                continue
            if wanted is not None and key not in wanted:
                unwanted += 1
            else:
                train.add(number, offset)
        if repeated:
            self.notes.append(f"{repeated} training rows left out: their questions are held out.")
        if not len(train) + unwanted:
            raise ValueError(f"{self.path!r} has no training rows: all are held out.")
        if self.kept is not None:
            self.notes.append(note_kept(self.kept, self.path, len(train), len(train) + unwanted))
        return {"train": train, "val": val}

    def _is_held_out(self, key: int) -> bool:
        return row_key(self.seed, "split", key) % 10**6 < self.val_share * 10**6

    def _scan(self, path: str) -> Iterator[tuple[int, int, Prompt]]:
        """(number, offset, problem) of every line, in one pass.

        Raises:
            ValueError: no such file, an empty one, or a line that cannot be read, by its number.
        """
        try:
            file = Path(path).expanduser().open("rb")
        except OSError as error:
            raise ValueError(f"cannot read the data file {path!r}: {error.strerror}.") from error
        offset, lines, unreadable = 0, 0, []
        with file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    lines += 1
                    prompt = self._parse(raw, number, path)
                    if prompt is None:
                        unreadable.append(number)
                    else:
                        yield number, offset, prompt
                offset += len(raw)
        if not lines:
            raise ValueError(f"{path!r} is empty: it has no rows.")
        if unreadable:
            self._judge_unreadable(path, unreadable, lines)

    def _parse(self, raw: bytes, number: int, path: str) -> Prompt | None:
        """The problem of a line, or None if its question or answer cannot be read."""
        where = f"line {number} of {path!r}"
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8: its byte {error.start} is {raw[error.start]:#04x}.") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object, but {raw[:60]!r}.")
        missing = [name for name in (self.question, self.answer) if name not in row]
        if missing:
            raise ValueError(f"{where} has no column {missing[0]!r}; its columns are {', '.join(row)}.")
        answer = gold_in(row[self.answer], self.answer_pattern)
        if answer is None or not is_text(row[self.question]):
            return None
        columns: dict[str, Any] = {name: cell for name, cell in row.items() if name not in (self.question, self.answer)}
        return Prompt(id=number, question=str(row[self.question]), answer=answer, columns=columns)

    def _judge_unreadable(self, path: str, unreadable: Sequence[int], total: int) -> None:
        which = f"lines {', '.join(map(str, unreadable[:5]))}"
        what = f"{len(unreadable)} of {total} rows of {path!r} have no question or answer that can be read ({which})"
        if self.bad_rows == "refuse" or len(unreadable) == total:
            hint = "" if not self.answer_pattern else f" with answer_pattern {self.answer_pattern!r}"
            raise ValueError(f"{what}{hint}. Mend the columns or the pattern, or set data.source.bad_rows to drop.")
        self.notes.append(f"{what}; left out.")


class _Lines(Sequence[Prompt]):
    """Some lines of a file, by where they begin; reads a line when it is asked for."""

    def __init__(self, source: JsonLinesPrompts, path: str) -> None:
        self.source, self.path = source, path
        self.numbers, self.offsets = array("q"), array("q")

    def add(self, number: int, offset: int) -> None:
        self.numbers.append(number)
        self.offsets.append(offset)

    def leave_out(self, numbers: Set[int]) -> None:
        stay = [i for i, number in enumerate(self.numbers) if number not in numbers]
        self.numbers = array("q", (self.numbers[i] for i in stay))
        self.offsets = array("q", (self.offsets[i] for i in stay))

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return list(self._read(range(*index.indices(len(self)))))
        return next(self._read([index]))

    def __iter__(self) -> Iterator[Prompt]:
        return self._read(range(len(self)))

    def _read(self, indices: Iterable[int]) -> Iterator[Prompt]:
        with Path(self.path).expanduser().open("rb") as file:
            for index in indices:
                file.seek(self.offsets[index])
                prompt = self.source._parse(file.readline(), self.numbers[index], self.path)
                if prompt is None:
                    raise ValueError(f"line {self.numbers[index]} of {self.path!r} has changed since the run began.")
                yield prompt


def permuted(index: int, size: int, key: int) -> int:
    """Where a permutation of 0 … size − 1, named by ``key``, sends ``index``; needs no memory.

    A Feistel network of four rounds over the next even number of bits, walked until it lands inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (row_key(key, turn, right) & mask)
        index = left << half | right
        if index < size:
            return index
