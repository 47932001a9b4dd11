"""``TablePrompts``: questions and answers from a data set of the hub, or from local JSON, Parquet or CSV files."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from grpo_pl.data.cells import is_text
from grpo_pl.data.hub import TEXT_BUILDERS, hub_builder
from grpo_pl.data.rows import RowPrompts, RowReader, Side
from grpo_pl.files.rows import Row
from grpo_pl.files.tables import ENDINGS, TextTable, format_of, in_full
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

ROWS_AT_ONCE = 1000
IMAGES_AT_ONCE = 32
_NOT_OF_CELLS = {"name", "version", "description", "data_dir", "data_files", "sep", "delimiter", "features"}
_NOT_OF_CELLS |= {"keep_default_na", "na_filter", "na_values", "chunksize"}
"""Settings of these builders that are heeded, or decide on types or speed alone."""


@dataclass(kw_only=True)
class TablePrompts(RowPrompts):
    """One row is one problem, of a data set of the hub or of local files.

    Questions and answers are what is written in the file; of a table with types, such as Parquet, they are written out
    in full. A table may be larger than memory: a text file is read in place, and of anything else ``datasets`` keeps a
    copy on disk and maps it into memory.
    """

    path: str
    """Name on the hub (``openai/gsm8k``), a local file (.jsonl, .ndjson, .json, .csv, .tsv, each also with .gz, or
    .parquet), a folder of such that ``datasets`` can read, with splits by the names of its files, or a folder of
    ``save_to_disk``."""
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
            return self._reader(self.path, self.train_split, self.path)
        if self.val_split is None and self.val_path is None:
            return None
        name = self.val_path or f"{self.path} ({self.val_split})"
        return self._reader(self.val_path or self.path, self.val_split or "train", name)

    def _reader(self, path: str, split: str, name: str) -> RowReader:
        parts = load_table(path, self.subset, split, written=self.written_columns())
        for table in (part.table for part in parts if isinstance(part.table, StoredTable)):
            table.decoded = not self.images  # what images may be is known before they are decoded
        local = Path(path).expanduser()
        folder = local if local.is_dir() else local.parent if local.is_file() else None
        reader = TableReader(parts, name, folder)
        if reader.columns:
            self.check_columns(repr(name), reader.columns)
        return reader

    def own_columns(self) -> list[str]:
        return [*super().own_columns(), *([self.worked] if self.worked else [])]

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        if self.worked is None:
            return None
        (row,) = self.problems("train").reader.read([prompt.id])
        return str(cell) if is_text(cell := row[self.worked]) else None


class StoredTable:
    """A table of ``datasets``, which has types.

    Args:
        written: columns whose cells are written out in full.
    """

    def __init__(self, table: Dataset, written: Collection[str]) -> None:
        self.table, self.columns = table, list(table.column_names)
        schema = table.data.schema
        self._written = {name: schema.field(name).type for name in written if name in self.columns}
        self.decoded = True
        """False gives images as they are stored, bytes and path, and few rows at a time."""

    def __len__(self) -> int:
        return len(self.table)

    def read(self, numbers: Iterable[int]) -> Iterator[Row]:
        """The rows of these numbers, from 0, in this order."""
        numbers = iter(numbers)
        while chunk := list(islice(numbers, ROWS_AT_ONCE if self.decoded else IMAGES_AT_ONCE)):
            part = self.table[chunk] if self.decoded else self.table.with_format("arrow")[chunk].to_pydict()
            for name, kind in self._written.items():
                part[name] = in_full(part[name], kind)
            yield from (dict(zip(part, cells, strict=True)) for cells in zip(*part.values(), strict=True))


class Part(NamedTuple):
    """Some rows of a table."""

    table: StoredTable | TextTable
    rows: range


class TableReader(RowReader):
    """Parts of tables, one after the other, as one table of which each row has all columns."""

    unit = "row"

    def __init__(self, parts: Sequence[Part], name: str, folder: Path | None = None) -> None:
        self.parts, self.name, self.folder = parts, name, folder
        self.columns = list(dict.fromkeys(column for part in parts for column in part.table.columns))
        self.starts = list(accumulate((len(part.rows) for part in parts), initial=0))

    def scan(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self.read(range(self.starts[-1])))

    def read(self, numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        for place, group in groupby(numbers, key=lambda number: bisect_right(self.starts, number) - 1):
            table, rows = self.parts[place]
            start = self.starts[place]
            for row in table.read(rows[number - start] for number in group):
                yield {name: row.get(name) for name in self.columns}


def load_table(path: str, subset: str | None, split: str, *, written: Collection[str]) -> list[Part]:
    """A split of a data set: CSV and JSON as they are written, anything else by ``datasets``.

    Args:
        written: columns whose cells are read as they are written, or written out in full where they have a type.

    Raises:
        ValueError: no such file, data set, subset or split; one line that says what there is.
    """
    import datasets

    local = Path(path).expanduser()
    if not local.exists() and (format_of(local) or path.startswith((".", "/", "~"))):
        raise ValueError(f"there is no file {path!r}.")
    saved = (local / "dataset_info.json").is_file() and (local / "state.json").is_file()
    if (local.is_file() or saved) and split != "train":
        raise ValueError(
            f"the file {path!r} has no split {split!r}: set val_split null and give val_path or val_share."
        )
    if local.is_file() and format_of(local) in ("json", "csv"):
        text = TextTable(local, written)
        return [Part(text, range(len(text)))]
    try:
        if local.is_file():
            if not format_of(local):
                raise ValueError(f"its name must end in one of {ENDINGS}")
            if not local.stat().st_size:
                raise ValueError("it is empty")
            with _without_chatter():
                builder = datasets.load_dataset_builder("parquet", data_files=str(local))
                return _of_builder(builder, split, written)
        elif saved:
            table = StoredTable(datasets.load_from_disk(str(local)), written)
        elif (local / "dataset_dict.json").is_file():
            saved_splits = datasets.load_from_disk(str(local)).items()
            return _of_splits({name: [StoredTable(part, written)] for name, part in saved_splits}, split)
        elif local.is_dir():
            with _without_chatter():
                return _of_builder(datasets.load_dataset_builder(str(local), subset), split, written)
        else:
            return _of_builder(hub_builder(path, subset), split, written)
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise ValueError(f"cannot load the data set {path!r}: {' '.join(str(reason).split())}") from error
    return [Part(table, range(len(table)))]


def _of_builder(builder: DatasetBuilder, split: str, written: Collection[str]) -> list[Part]:
    """The rows of a split of a folder or a data set of the hub, of which ``datasets`` tells the files."""
    if builder.name not in TEXT_BUILDERS:
        if builder.name == "parquet" and builder.info.features is None:
            for file in chain(*_files(builder).values()):
                _check_columns(file)
        builder.download_and_prepare()
        table = StoredTable(builder.as_dataset(split=split), written)
        return [Part(table, range(len(table)))]
    usual = vars(type(builder.config)())
    delimiter = getattr(builder.config, "sep", None)
    for name, value in vars(builder.config).items():
        followed = len(value or "") == 1 if name == "sep" else name in _NOT_OF_CELLS or value in (usual[name], "utf-8")
        if not followed:
            raise ValueError(f"its card sets {name}: {value!r}, with which types are guessed: give a file without that")
    if other := [file for file in chain(*builder.config.data_files.values()) if format_of(file) not in TEXT_BUILDERS]:
        raise ValueError(f"types are guessed in {other[0]!r}: give a file whose name ends in one of {ENDINGS}")
    files = _files(builder)
    asked = files if split == "all" else {re.split(r"[\[(]", name.strip())[0] for name in split.split("+")}
    tables = {
        name: [TextTable(Path(file), written, delimiter) for file in of_split] if name in asked else []
        for name, of_split in files.items()
    }
    return _of_splits(tables, split)


def _files(builder: DatasetBuilder) -> dict[str, list[str]]:
    """The files of each split, downloaded where they are the hub's."""
    import datasets

    files = {str(name): list(of_split) for name, of_split in builder.config.data_files.items()}
    return cast(dict[str, list[str]], datasets.DownloadManager().download(files))


def _check_columns(file: str) -> None:
    """Refuses a Parquet file with a column of a type that ``datasets`` has not, by its name."""
    import datasets
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    for field in parquet.read_schema(file):
        try:
            datasets.Features.from_arrow_schema(pyarrow.schema([field]))
        except ValueError as error:
            raise ValueError(
                f"column {field.name!r} is of type {field.type}, which datasets cannot read: write the file without it"
            ) from error


def _of_splits(tables: Mapping[str, Sequence[StoredTable | TextTable]], split: str) -> list[Part]:
    """The rows of ``train``, ``train[:50%]``, ``train+test``, ``all`` …, of the tables of each split."""
    import datasets

    lengths = {str(name): sum(map(len, of_split)) for name, of_split in tables.items()}
    parts = list[Part]()
    asked = "+".join(lengths) if split == "all" else split
    for chosen in datasets.ReadInstruction.from_spec(asked).to_absolute(lengths):
        first = 0
        for table in tables[chosen.splitname]:
            rows = range(len(table))[max(0, chosen.from_ - first) : max(0, chosen.to - first)]
            parts.append(Part(table, rows))
            first += len(table)
    return parts


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
