"""``RowPrompts``: one problem per row of files that may be larger than memory."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from grpo_pl.data.cells import (
    asked_key,
    check_pattern,
    conversation_in,
    conversation_text,
    gold_in,
    image_digests,
    is_conversation,
    is_text,
    read_kept,
    unreadable,
)
from grpo_pl.data.image_limits import IMAGE_COLUMNS, ImageLimits
from grpo_pl.data.sources import Problems, PromptSource, is_of_part
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

Side = Literal["train", "val"]
EXAMPLES_SHOWN = 5


class RowReader(ABC):
    """The rows of one file or split; none of them stays in memory."""

    name: str
    """Name of the file or split in messages."""
    unit: str
    """Name of one of its rows in messages: row, line …"""
    folder: Path | None = None
    """Folder that paths of images in its rows are relative to; None where there is no file of our own."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Every row with its number, in one pass.

        Raises:
            ValueError: one cannot be read; which.
        """

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """The rows of these numbers, in this order, after a `scan`."""


@dataclass(kw_only=True)
class RowPrompts(PromptSource):
    """Base of sources of rows; of a file only 24 bytes a row stay in memory.

    All rows are read at the start, which checks them, and then only where a step asks. A step takes the next rows
    of a permutation that seed and epoch determine, so each row comes once an epoch. What is left over at the end of an
    epoch, less than a batch, waits for another one. Rows with equal questions are held out together, and training
    rows whose question is held out are left out, so no question is in both.
    """

    path: str
    """File or data set with the rows."""
    val_path: str | None = None
    """A further file or data set with rows to validate on."""
    val_share: float = 0.05
    """Share of the rows that is held out where nothing else is said about validation."""
    question: str = "question"
    """Column of the question: text, or a conversation as a list of messages with role and content. Rows without a
    column ``question`` may call it ``prompt``."""
    answer: str | None = "answer"
    """Column of the gold answer; null where the data has none and no reward needs one."""
    answer_pattern: str = ""
    r"""Regular expression whose first group is the gold answer inside ``answer``, last match; ``####\s*(.+)`` reads
    GSM8K's. Empty takes the whole column."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Rows whose answer cannot be read: refuse to start, or leave them out and say how many."""
    kept: str | None = None
    """File that ``grpo-pl filter`` wrote: of the training problems only those in it are taken."""
    seed: int = 0
    """Names the order of the rows, and which are held out."""
    demonstrated_share: float = 1.0
    """Share of the training rows, by a hash, that a cold start shows; below 1 rollouts ask the others alone, so that
    none is answered from memory."""
    images: bool | ImageLimits = False
    """Read the images of each row, in a column ``image`` or ``images`` or in the parts of its messages, for a policy
    that sees them; the fields of ``ImageLimits`` say what is refused."""

    notes: list[str] = field(init=False, default_factory=list, repr=False, compare=False)
    """Lines to print about rows that were left out while loading."""
    _rows: dict[Side, Rows] | None = field(init=False, default=None, repr=False, compare=False)
    _columns_known: bool = field(init=False, default=False, repr=False, compare=False)
    _digests: dict[str, str] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_within("[0, 1)", "data.source", val_share=self.val_share)
        check_pattern(self.answer_pattern)
        if self.answer is None and self.answer_pattern:
            raise ValueError(f"data.source.answer is null, so answer_pattern {self.answer_pattern!r} has no column.")

    def init_args(self) -> dict[str, Any]:
        given = super().init_args()
        return given if self.images else {name: value for name, value in given.items() if name != "images"}

    @property
    def image_limits(self) -> ImageLimits | None:
        """The limits of ``images``; None where no images are read."""
        return ImageLimits() if self.images is True else self.images or None

    @abstractmethod
    def open_rows(self, split: Side) -> RowReader | None:
        """The rows to train on, or to validate on; None where those are a share of the training rows."""

    @property
    def validates_only(self) -> bool:
        """True if the rows to validate on are all there are."""
        return False

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        rows = self.problems("train")
        of_step = rows.part(self.demonstrated_share, step)
        size = len(of_step)
        if size < count:
            part = "" if size == len(rows) else f", of which a step of this kind may take {size},"
            raise ValueError(
                f"{self.path!r} has {len(rows)} training rows{part} and a step asks for {count}: lower "
                f"{'data.prompts_per_step' if step >= 0 else 'model.cold_start.batch_size'}."
            )
        epoch, place = divmod(step, size // count)
        chosen = set[int]()
        for number in range(attempt + 1):  # an attempt takes no row of an earlier one, as long as there are others
            key = row_key(self.seed, "rows", epoch, number)
            turned = [range(place * count, size), range(place * count)]
            fresh = (i for places in turned for i in _permuted(places, size, key) if i not in chosen)
            picked = list(islice(fresh, count))
            again = (i for places in turned for i in _permuted(places, size, key) if i not in picked)
            picked += islice(again, count - len(picked))
            chosen.update(picked)
        return rows.at([of_step[i] for i in picked])

    def demonstrated(self) -> int:
        return len(self.problems("train").part(self.demonstrated_share, -1))

    def validation(self, count: int | None = None) -> list[Problem]:
        return self.problems("val")[:count]

    def problems(self, split: Side) -> Rows:
        """In the order of the file, read when asked for; ``Problem.id`` is the number of the row."""
        if self._rows is None:
            self._rows = self._load()
        return self._rows[split]

    def leave_out(self, ids: Mapping[Side, Set[int]]) -> None:
        for split, unwanted in ids.items():
            self.problems(split).leave_out(unwanted)

    def digests(self) -> dict[str, str]:
        """Of the rows as they are read, in their order: the same for a file that was copied, moved or touched."""
        self.problems("train")
        return dict(self._digests)

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load(self) -> dict[Side, Rows]:
        reader, further = self.open_rows("train"), self.open_rows("val")
        assert reader is not None
        train, val = Rows(self, reader), Rows(self, further or reader)
        held_out = set[int]()
        for number, key in () if further is None else self._readable(further, "val"):
            val.add(number, key)
            held_out.add(key)
        if self.validates_only:
            return {"train": train, "val": val}
        wanted = None if self.kept is None else {row_key(question) for question in read_kept(self.kept)}
        if wanted is not None:
            self._digests["kept"] = hashlib.blake2b(repr(sorted(wanted)).encode(), digest_size=16).hexdigest()
        repeated = unwanted = 0
        for number, key in self._readable(reader, "train"):
            if further is None and row_key(self.seed, "split", key) % 10**6 < self.val_share * 10**6:
                val.add(number, key)
            elif key in held_out:
                repeated += 1
            elif wanted is not None and key not in wanted:
                unwanted += 1
            else:
                train.add(number, key)
        if repeated:
            self.notes.append(f"{repeated} training rows left out: their questions are held out.")
        if not len(train) + unwanted:
            raise ValueError(f"{self.path!r} has no training rows: all {repeated + len(val)} are held out.")
        if self.kept is not None:
            where = f"{len(train) + unwanted} training rows"
            if not len(train):
                raise ValueError(
                    f"none of the {where} of {self.path!r} is in {self.kept!r}: it was made of other problems."
                )
            self.notes.append(f"{len(train)} of {where} taken: those in {self.kept!r}.")
        return {"train": train, "val": val}

    def _readable(self, reader: RowReader, split: Side) -> Iterator[tuple[int, int]]:
        """Number, and key of the question, of every row that is a problem; judges the others at the end."""
        total, bad, seen = 0, 0, 0
        shown: list[str] = []
        digest = hashlib.blake2b(digest_size=16)
        for number, row in reader.scan():
            total += 1
            problem = self.problem(number, row, reader.folder)
            digest.update(self._told(number, row, problem).encode())
            if isinstance(problem, Problem):
                seen += bool(image_digests(problem))
                yield number, row_key(asked_key(problem))
                continue
            bad += 1
            if len(shown) < EXAMPLES_SHOWN:
                shown.append(f"{reader.unit} {number}: {problem}")
        self._digests[split] = digest.hexdigest()
        if not total:
            raise ValueError(f"{reader.name!r} is empty: it has no rows.")
        if self.images and not seen and bad < total:
            raise ValueError(
                f"{reader.name!r} has no images in columns image or images, or in messages: name the column so, or set "
                "data.source.images to false."
            )
        if not bad:
            return
        parts = "question, answer or images" if self.images else "question or answer"
        what = f"{bad} of {total} rows of {reader.name!r} have no {parts} that can be read"
        what += f" ({'; '.join(shown)})"
        if self.bad_rows == "refuse" or bad == total:
            hint = "" if not self.answer_pattern else f" with answer_pattern {self.answer_pattern!r}"
            raise ValueError(f"{what}{hint}. Mend the columns or the pattern, or set data.source.bad_rows to drop.")
        self.notes.append(f"{what}; left out.")

    def _told(self, number: int, row: Mapping[str, Any], problem: Problem | str) -> str:
        """A row as its digest takes it; of images the pixels count, wherever they come from."""
        pixels: tuple[str, ...] = ()
        if self.images:
            row = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
            pixels = (problem,) if isinstance(problem, str) else (*image_digests(problem),)
            if isinstance(problem, Problem) and problem.messages is not None:  # in which no image is, but its place
                row[self.question] = problem.messages
        return json.dumps([number, row, *pixels], default=str)

    def problem(self, number: int, row: Mapping[str, Any], folder: Path | None = None) -> Problem | str:
        """The problem in a row, or, as a text, the question, answer or image that cannot be read and why.

        Args:
            folder: see `RowReader`.
        """
        cell, messages, more = row[self.question], None, dict[str, Any]()
        try:
            if (limits := self.image_limits) is not None:
                from grpo_pl.extras.images.row_images import read_images

                folder = Path(limits.folder) if limits.folder is not None else folder
                messages, more["images"] = read_images(row, cell, folder=folder, limits=limits)
            elif is_conversation(cell):
                messages = conversation_in(cell, images="images are read with data.source.images: true.")
        except ValueError as error:
            return str(error).rstrip(".")
        if messages is None and not is_text(cell):
            return unreadable(self.question, cell)
        answer = "" if self.answer is None else gold_in(row[self.answer], self.answer_pattern)
        if answer is None:
            return unreadable(str(self.answer), row[str(self.answer)])
        left_out = {*self.own_columns(), *(IMAGE_COLUMNS if self.images else ())}
        return Problem(
            id=number,
            question=str(cell) if messages is None else conversation_text(messages),
            answer=answer,
            columns={**{name: value for name, value in row.items() if name not in left_out}, **more},
            messages=messages,
        )

    def own_columns(self) -> list[str]:
        """Columns that must be there and that rewards do not see under their names."""
        return [self.question, *([] if self.answer is None else [self.answer])]

    def written_columns(self) -> list[str]:
        """Columns whose cells are read as they are written; the others have the types of the file."""
        return [*self.own_columns(), "prompt"]  # which stands for the question where there is none

    def check_columns(self, where: str, columns: Iterable[str]) -> None:
        """Refuses rows that lack a column."""
        there = list(columns)
        if not self._columns_known and self.question == "question" and "question" not in there and "prompt" in there:
            self.question = "prompt"  # TRL's name
        self._columns_known = True  # all rows are of one form
        missing = next((name for name in self.own_columns() if name not in there), None)
        if missing is not None:
            hint = " If no reward needs a gold answer, set data.source.answer to null." * (missing == self.answer)
            raise ValueError(f"{where} has no column {missing!r}; its columns are {', '.join(there)}.{hint}")


class Rows(Problems):
    """Some rows of a file as problems, each read when it is asked for."""

    def __init__(self, source: RowPrompts, reader: RowReader) -> None:
        self.source, self.reader = source, reader
        self.numbers, self.keys = array("q"), array("q")
        self._parts: dict[bool, Sequence[int]] = {}

    def part(self, demonstrated_share: float, step: int) -> Sequence[int]:
        """The indices of the rows that a cold start shows (``step`` below 0), or else of those that rollouts ask."""
        if demonstrated_share == 1.0:
            return range(len(self))
        if not self._parts:
            for shown in (True, False):
                keys = enumerate(self.keys)
                of_part = (i for i, key in keys if is_of_part(demonstrated_share, -shown, self.source.seed, key))
                self._parts[shown] = array("q", of_part)
        return self._parts[step < 0]

    def add(self, number: int, key: int) -> None:
        """Adds a row; ``key`` is the same for all rows of its question."""
        self.numbers.append(number)
        self.keys.append(key)

    def leave_out(self, numbers: Set[int]) -> None:
        """Forgets the rows of these numbers."""
        stay = [i for i, number in enumerate(self.numbers) if number not in numbers]
        self.numbers = array("q", (self.numbers[i] for i in stay))
        self.keys = array("q", (self.keys[i] for i in stay))
        self._parts = {}

    def at(self, indices: Sequence[int]) -> list[Problem]:
        return list(self._read(indices))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Problem]:
        return self._read(range(len(self)))

    def _read(self, indices: Sequence[int]) -> Iterator[Problem]:
        numbers = array("q", (self.numbers[i] for i in indices))
        for number, row in zip(numbers, self.reader.read(numbers), strict=True):
            problem = self.source.problem(number, row, self.reader.folder)
            if not isinstance(problem, Problem):
                unit, name = self.reader.unit, self.reader.name
                raise ValueError(f"{unit} {number} of {name!r} has changed since the run began.")
            yield problem


def _permuted(indices: Iterable[int], size: int, key: int) -> Iterator[int]:
    return (permuted(index, size, key) for index in indices)


def permuted(index: int, size: int, key: int) -> int:
    """π(index) of the permutation π of 0 … size − 1 that ``key`` names; needs no memory.

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
