"""``TablePrompts``: questions and answers from a data set of the hub, or from local JSON, Parquet or CSV files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_pl.data.cells import check_pattern, gold_in, is_text, normal_question, note_kept, read_kept
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.hub import prefer_cache_without_network
from grpo_pl.types import Prompt

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
"""File suffix -> the name of its reader in ``datasets``."""
EXAMPLES_SHOWN = 5
SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")


@dataclass(kw_only=True)
class TablePrompts(PromptSource):
    """One row is one problem. Held-out problems come from a split of their own or are a share of the rows.

    A step takes the next rows of a permutation that seed and epoch determine, so each row comes once an epoch. What
    is left over at the end of an epoch, less than a batch, waits for another one. Rows with equal questions are held
    out together, and training rows whose question is held out are left out, so no question is in both.
    """

    path: str
    """Name on the hub (``openai/gsm8k``), a local file (.jsonl, .json, .parquet, .csv, .tsv), or a folder of such that
    ``datasets`` can read, with splits by the names of its files."""
    subset: str | None = None
    """Configuration of a hub data set (``main`` of GSM8K)."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str | None = None
    """Split to validate on; null holds out ``val_share`` of the training split. The same as ``train_split`` makes a
    source for validation only."""
    val_path: str | None = None
    """A further local file or folder to validate on, instead of ``val_split``."""
    val_share: float = 0.05
    """Share of the rows that is held out where there is neither ``val_split`` nor ``val_path``."""
    question: str = "question"
    """Column of the question."""
    answer: str = "answer"
    """Column of the gold answer."""
    answer_pattern: str = ""
    r"""Regular expression whose first group is the gold answer inside ``answer``, last match; ``####\s*(.+)`` reads
    GSM8K's. Empty takes the whole column."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What to do with rows whose answer cannot be read: refuse to start, or leave them out and say how many."""
    kept: str | None = None
    """File that ``grpo-pl filter`` wrote: of the training problems only those in it are taken."""
    worked: str | None = None
    """Column of worked completions, demonstrations for the cold start; never shown to rewards."""
    seed: int = 0
    """Names the order of the rows, and which are held out."""

    _rows: dict[str, list[Prompt]] | None = field(init=False, default=None, repr=False, compare=False)
    _worked: dict[int, str] = field(init=False, default_factory=dict, repr=False, compare=False)
    notes: list[str] = field(init=False, default_factory=list, repr=False, compare=False)
    """What was left out while loading, for people to read."""

    def __post_init__(self) -> None:
        if self.val_split is not None and self.val_path is not None:
            raise ValueError("data.source: give val_split or val_path, not both.")
        if not 0.0 <= self.val_share < 1.0:
            raise ValueError(f"data.source.val_share must lie in [0, 1), got {self.val_share}.")
        check_pattern(self.answer_pattern)

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Prompt]:
        rows = self.problems("train")
        if len(rows) < count:
            raise ValueError(
                f"{self.path!r} has {len(rows)} training rows and a step asks for {count}: lower data.prompts_per_step."
            )
        epoch, part = divmod(step, len(rows) // count)
        start, chosen = part * count, set[int]()
        for number in range(attempt + 1):  # an attempt takes no row of an earlier one, as long as there are others
            order = _permutation(len(rows), row_key(self.seed, "rows", epoch, number))
            turned = (*order[start:], *order[:start])
            fresh = [i for i in turned if i not in chosen]
            picked = (fresh + [i for i in turned if i in chosen])[:count]
            chosen.update(picked)
        return [rows[i] for i in picked]

    def validation(self, count: int | None = None) -> list[Prompt]:
        return self.problems("val")[:count]

    def demonstration(self, prompt: Prompt, rng: random.Random) -> str | None:
        return self._worked.get(prompt.id)

    def problems(self, split: Literal["train", "val"]) -> list[Prompt]:
        """In the order of the file; ``Prompt.id`` is the number of the row in its file."""
        if self._rows is None:
            self._rows = self._load()
        return self._rows[split]

    def leave_out(self, ids: Mapping[Literal["train", "val"], Set[int]]) -> None:
        self._rows = {
            split: [row for row in self.problems(split) if row.id not in ids.get(split, ())] for split in SPLITS
        }

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, list[Prompt]]:
        table = load_table(self.path, self.subset, self.train_split)
        everything = self._read(table, self.path)
        if self.val_split is not None or self.val_path is not None:
            held_out = load_table(self.val_path or self.path, self.subset, self.val_split or "train")
            val = self._read(held_out, self.val_path or f"{self.path} ({self.val_split})")
        else:
            val = [row for row in everything if self._is_held_out(row)]
        questions = {normal_question(row.question) for row in val}
        train = [row for row in everything if normal_question(row.question) not in questions]
        repeated = len(everything) - len(train)
        validates_only = self.val_split == self.train_split and self.val_path is None
        if repeated and not validates_only and (self.val_split is not None or self.val_path is not None):
            self.notes.append(f"{repeated} training rows left out: their questions are held out.")
        if not train and not validates_only:
            raise ValueError(f"{self.path!r} has no training rows: all {len(everything)} are held out.")
        if self.kept is not None:
            wanted = read_kept(self.kept)
            before, train = len(train), [row for row in train if normal_question(row.question) in wanted]
            self.notes.append(note_kept(self.kept, self.path, len(train), before))
        if self.worked is not None:
            self._worked = dict(enumerate(map(str, table[self.worked])))
        return {"train": train, "val": val}

    def _read(self, table: Dataset, name: str) -> list[Prompt]:
        names = [self.question, self.answer, *([self.worked] if self.worked else [])]
        missing = [column for column in names if column not in table.column_names]
        if missing:
            raise ValueError(f"{name!r} has no column {missing[0]!r}; its columns are {', '.join(table.column_names)}.")
        if not len(table):
            raise ValueError(f"{name!r} is empty: it has no rows.")
        rest = [column for column in table.column_names if column not in names]
        rows, unreadable = [], []
        for number, row in enumerate(table):
            answer = gold_in(row[self.answer], self.answer_pattern)
            if answer is None or not is_text(row[self.question]):
                unreadable.append((number, row[self.answer] if answer is None else row[self.question]))
                continue
            columns = {column: row[column] for column in rest}
            rows.append(Prompt(id=number, question=str(row[self.question]), answer=answer, columns=columns))
        self._judge_unreadable(name, unreadable, len(table))
        return rows

    def _judge_unreadable(self, name: str, unreadable: Sequence[tuple[int, Any]], total: int) -> None:
        if not unreadable:
            return
        first = "; ".join(f"row {number}: {str(cell)[:60]!r}" for number, cell in unreadable[:EXAMPLES_SHOWN])
        what = f"{len(unreadable)} of {total} rows of {name!r} have no question or answer that can be read ({first})"
        if self.bad_rows == "refuse" or len(unreadable) == total:
            hint = "" if not self.answer_pattern else f" with answer_pattern {self.answer_pattern!r}"
            raise ValueError(f"{what}{hint}. Mend the columns or the pattern, or set data.source.bad_rows to drop.")
        self.notes.append(f"{what}; left out.")

    def _is_held_out(self, row: Prompt) -> bool:
        digest = hashlib.sha256(normal_question(row.question).encode()).digest()
        share = row_key(self.seed, "split", int.from_bytes(digest[:8], "big")) % 10**6
        return share < self.val_share * 10**6


def load_table(path: str, subset: str | None, split: str) -> Dataset:
    """A split of a data set by ``datasets``.

    Raises:
        ValueError: no such file, data set, subset or split; one line that says what there is.
    """
    import datasets

    local = Path(path).expanduser()
    if not local.exists() and (local.suffix in FORMATS or path.startswith((".", "/", "~"))):
        raise ValueError(f"there is no file {path!r}.")
    if local.is_file() and split != "train":
        raise ValueError(
            f"the file {path!r} has no split {split!r}: set val_split null and give val_path or val_share."
        )
    try:
        if local.is_file():
            return _read_file(local)
        if local.is_dir():
            with _without_chatter():
                return datasets.load_dataset(str(local), subset, split=split)
        prefer_cache_without_network()
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise ValueError(f"cannot load the data set {path!r}: {' '.join(str(reason).split())}") from error


def _read_file(file: Path) -> Dataset:
    import datasets

    if file.suffix not in FORMATS:
        raise ValueError(f"its name must end in one of {', '.join(FORMATS)}")
    if not file.stat().st_size:
        raise ValueError("it is empty")
    options: dict[str, Any] = {"sep": "\t"} if file.suffix == ".tsv" else {}
    with _without_chatter():
        try:
            return datasets.load_dataset(FORMATS[file.suffix], data_files=str(file), split="train", **options)
        except ValueError as error:
            if "corresponds to no data" in str(error):
                raise ValueError("it is empty") from error
            raise


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Reading a file takes a moment and its errors are told in one line; downloads keep their bars."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)


@lru_cache(maxsize=8)
def _permutation(size: int, key: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(key).shuffle(order)
    return tuple(order)
