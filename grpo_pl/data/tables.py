"""``TablePrompts``: questions and answers from a data set of the hub, or from local JSON, Parquet or CSV files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_pl.data.cells import is_text
from grpo_pl.data.rows import RowPrompts, RowReader, Side
from grpo_pl.files.rows import not_utf8
from grpo_pl.rewards.pretrained import offline_without_network
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
"""File suffix -> the name of its reader in ``datasets``."""
TEXT = (".json", ".jsonl", ".csv", ".tsv")
ROWS_AT_ONCE = 1000


@dataclass(kw_only=True)
class TablePrompts(RowPrompts):
    """One row is one problem, of a data set of the hub or of local files.

    ``datasets`` keeps what it reads on disk and maps it into memory, so a table may be larger than memory.
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
    worked: str | None = None
    """Column of worked completions, demonstrations for the cold start; never shown to rewards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_split is not None and self.val_path is not None:
            raise ValueError("data.source: give val_split or val_path, not both.")

    @property
    def validates_only(self) -> bool:
        return self.val_split == self.train_split and self.val_path is None

    def open_rows(self, split: Side) -> RowReader | None:
        if split == "train":
            return _TableReader(self._table(self.path, self.train_split), self.path, self)
        if self.val_split is None and self.val_path is None:
            return None
        table = self._table(self.val_path or self.path, self.val_split or "train")
        return _TableReader(table, self.val_path or f"{self.path} ({self.val_split})", self)

    def _table(self, path: str, split: str) -> Dataset:
        return load_table(path, self.subset, split, text=self.own_columns())

    def own_columns(self) -> list[str]:
        return [*super().own_columns(), *([self.worked] if self.worked else [])]

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        if self.worked is None:
            return None
        (row,) = self.problems("train").reader.read([prompt.id])
        return str(cell) if is_text(cell := row[self.worked]) else None


class _TableReader(RowReader):
    unit = "row"

    def __init__(self, table: Dataset, name: str, source: TablePrompts) -> None:
        self.table, self.name = table, name
        source.check_columns(repr(name), table.column_names)

    def scan(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self.read(range(len(self.table))))

    def read(self, numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        for first in range(0, len(numbers), ROWS_AT_ONCE):
            part = self.table[list(numbers[first : first + ROWS_AT_ONCE])]
            yield from (dict(zip(part, cells, strict=True)) for cells in zip(*part.values(), strict=True))


def load_table(path: str, subset: str | None, split: str, *, text: Sequence[str]) -> Dataset:
    """A split of a data set by ``datasets``.

    Args:
        text: columns of a CSV file that are text, even if all of it looks like numbers.

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
            return _read_file(local, text)
        if local.is_dir():
            for file in sorted(local.rglob("*")):
                check_utf8(file)
            with _without_chatter():
                return datasets.load_dataset(str(local), subset, split=split)
        offline_without_network()
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise ValueError(f"cannot load the data set {path!r}: {' '.join(str(reason).split())}") from error


def _read_file(file: Path, text: Sequence[str]) -> Dataset:
    import datasets

    if file.suffix not in FORMATS:
        raise ValueError(f"its name must end in one of {', '.join(FORMATS)}")
    if not file.stat().st_size:
        raise ValueError("it is empty")
    check_utf8(file)
    options: dict[str, Any] = {}
    if FORMATS[file.suffix] == "csv":
        options = {"sep": "\t" if file.suffix == ".tsv" else ",", "converters": dict.fromkeys(text, str)}
    with _without_chatter():
        try:
            return datasets.load_dataset(FORMATS[file.suffix], data_files=str(file), split="train", **options)
        except ValueError as error:
            if "corresponds to no data" in str(error):
                raise ValueError("it is empty") from error
            raise


def check_utf8(file: Path) -> None:
    """Finds the line of a text file that is not UTF-8, which readers do not name."""
    if file.suffix not in TEXT or not file.is_file():
        return
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(f"line {number} of {file.name!r}", error) from error


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Silences the progress bars and messages of ``datasets`` while it reads local files."""
    import datasets

    level, shown = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)
