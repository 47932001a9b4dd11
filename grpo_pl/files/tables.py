"""Tables in files, CSV, JSON, JSON Lines and Parquet: rows with cells as they are written."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import tempfile
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import pyarrow  # type: ignore[import-untyped]
from pyarrow import parquet

from grpo_pl.files.rows import Row, decoded, line_name, parse_object, parse_row

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Ending of a name -> what the file is read as; all but Parquet may also end in .gz."""
ENDINGS = f"{', '.join(FORMATS)}, or the same with .gz"
_BETWEEN = re.compile(r"[\s\ufeff]*")


def format_of(file: Path | str) -> str:
    """``json``, ``csv`` or ``parquet``, by the name of a file in any case; empty for any other."""
    name = Path(str(file).lower())
    packed = name.suffix == ".gz"
    kind = FORMATS.get((name.with_suffix("") if packed else name).suffix, "")
    return "" if packed and kind == "parquet" else kind


class TextTable:
    """The rows of a CSV, TSV, JSON Lines or JSON file, plain or .gz, each read when it is asked for; 8 bytes a row stay
    in memory. A row has the keys that it has in the file, and CSV, which has no types, gives every cell as text.

    All rows are read once to see where they are; a JSON file of one array is whole in memory while that is done, and
    a .gz file is unpacked into a temporary file.

    Args:
        file: the file, by whose ending it is read.
        written: keys of JSON rows whose numbers are given as they are written; a row of CSV may lack cells at its end,
            which are empty then, but none of these.
        delimiter: what stands between the cells of a CSV file; by default a comma, in .tsv a tab.

    Raises:
        ValueError: it is empty, cut short, or a line that cannot be read, by its number.
    """

    def __init__(self, file: Path, written: Collection[str] = (), delimiter: str | None = None) -> None:
        self._made_of = (file, written, delimiter)
        self.file, self.written = file, written
        self._is_csv = format_of(file) == "csv"
        self._delimiter = delimiter or ("\t" if ".tsv" in file.name.lower() else ",")
        self._bytes = _unpacked(file) if file.suffix.lower() == ".gz" else file.open("rb")
        self._size = os.fstat(self._bytes.fileno()).st_size
        if not self._size:
            raise ValueError(f"{str(file)!r} is empty: it has no rows.")
        self._starts = array("q")
        columns: dict[str, None] = {}
        for start, row in self._walk():
            self._starts.append(start)
            columns |= dict.fromkeys(row)
        self._starts.append(self._size)
        self.columns = list(columns or (self._header if self._is_csv else ()))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, numbers: Iterable[int]) -> Iterator[Row]:
        """The rows of these numbers, from 0, in this order."""
        return map(self._row, numbers)

    def _row(self, number: int) -> Row:
        start, end = self._starts[number], self._starts[number + 1]
        raw = os.pread(self._bytes.fileno(), end - start, start)  # where a fork of this process reads does not matter
        where = f"row {number} of {str(self.file)!r}"
        if self._is_csv:
            lines = (decoded(line, where) for line in raw.splitlines(keepends=True))
            try:
                return self._record(next(self._records(lines), []), where)
            except csv.Error as error:
                raise ValueError(f"{where} cannot be read as CSV: {error}.") from error
        if self._is_lines:
            return parse_row(raw.partition(b"\n")[0], where, self.written)
        text = decoded(raw, where)
        return self._object(text[: json.JSONDecoder().raw_decode(text)[1]], where)

    def __reduce__(self) -> Any:
        return (TextTable, self._made_of)

    def _walk(self) -> Iterator[tuple[int, Row]]:
        """Where each row starts, in bytes, and the row."""
        self._bytes.seek(0)
        if self._is_csv:
            return self._walk_csv()
        self._is_lines = self._holds_lines()
        self._bytes.seek(0)
        return self._walk_lines() if self._is_lines else self._walk_values()

    def _holds_lines(self) -> bool:
        """False for a JSON file of one array, or of objects of several lines."""
        first = next((line for raw in self._bytes if (line := raw.removeprefix(BOM_UTF8).strip())), b"{}")
        if first.startswith(b"{") and self.file.name.lower().removesuffix(".gz").endswith(".json"):
            try:
                parse_object(first, "")
            except ValueError:
                return False
        return not first.startswith(b"[")

    def _walk_lines(self) -> Iterator[tuple[int, Row]]:
        offset = 0
        for number, raw in enumerate(self._bytes, start=1):
            if raw.removeprefix(BOM_UTF8).strip():
                yield offset, parse_row(raw, line_name(self.file, number), self.written)
            offset += len(raw)

    def _walk_values(self) -> Iterator[tuple[int, Row]]:
        """The objects of an array, or one after the other."""
        lines = enumerate(self._bytes, start=1)
        text = "".join(decoded(raw, line_name(self.file, number)) for number, raw in lines)
        decoder = json.JSONDecoder()
        place = _after(text, 0)
        ends = "]" if text[place] == "[" else ""
        place = _after(text, place + len(ends))
        offset, seen, line = len(text[:place].encode()), place, 1 + text.count("\n", 0, place)
        first = True
        while place < len(text) and (not ends or text[place] != ends):
            try:
                if ends and not first:
                    if text[place] != ",":
                        raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
                    place = _after(text, place + 1)
                _, end = decoder.raw_decode(text, place)
            except json.JSONDecodeError as error:
                where = line_name(self.file, error.lineno)
                raise ValueError(f"{where} is not JSON: {error.msg} at character {error.colno}.") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{str(self.file)!r} cannot be read as JSON: {error}.") from error
            offset += len(text[seen:place].encode())
            line += text.count("\n", seen, place)
            yield offset, self._object(text[place:end], line_name(self.file, line))
            seen, place, first = place, _after(text, end), False
        if ends and (place >= len(text) or _after(text, place + 1) < len(text)):
            where = line_name(self.file, 1 + text.count("\n", 0, place))
            raise ValueError(f"{where} is not JSON: {'more after' if place < len(text) else 'no'} end of the array.")

    def _object(self, text: str, where: str) -> Row:
        return parse_row(text.encode(), where, self.written)

    def _walk_csv(self) -> Iterator[tuple[int, Row]]:
        place = [0, 0]  # bytes and lines that the records so far are made of

        def texts() -> Iterator[str]:
            lines = (line for raw in self._bytes for line in raw.splitlines(keepends=True))  # some end in \r alone
            for number, raw in enumerate(lines, start=1):
                place[:] = place[0] + len(raw), number
                yield decoded(raw, line_name(self.file, number)).removeprefix("\ufeff" if number == 1 else "")

        records = self._records(texts())
        self._header: list[str] = []
        while True:
            start, where = place[0], line_name(self.file, place[1] + 1)
            try:
                cells = next(records, None)
            except csv.Error as error:
                raise ValueError(f"{where} cannot be read as CSV: {error}.") from error
            if cells is None:
                return
            if not cells:
                continue  # a blank line
            if self._header:
                yield start, self._record(cells, where)
                continue
            self._header = [name or f"Unnamed: {i}" for i, name in enumerate(cells)]
            if twice := [name for name in self._header if self._header.count(name) > 1]:
                raise ValueError(f"{where} names two columns {twice[0]!r}: give each a name of its own.")

    def _records(self, lines: Iterable[str]) -> Iterator[list[str]]:
        csv.field_size_limit(2**31 - 1)  # 131,072 characters, which a worked solution may exceed
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _record(self, cells: Sequence[str], where: str) -> Row:
        lacking = self._header[len(cells) :]  # spreadsheets drop empty cells at the end
        if len(cells) > len(self._header) or not set(lacking).isdisjoint(self.written):
            raise ValueError(f"{where} has {len(cells)} cells, and the header names {len(self._header)} columns.")
        return dict(zip(self._header, [*cells, *("" for _ in lacking)], strict=True))


def _after(text: str, place: int) -> int:
    match = _BETWEEN.match(text, place)
    return match.end() if match else place


def _unpacked(file: Path) -> IO[bytes]:
    """The content of a .gz file, in a temporary file that goes with its last user."""
    copy, lines = tempfile.TemporaryFile(), 0  # noqa: SIM115 - the caller keeps it
    try:
        with gzip.open(file) as packed:
            while part := packed.read1(io.DEFAULT_BUFFER_SIZE * 16):
                lines += part.count(b"\n")
                copy.write(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{str(file)!r} is cut short or damaged behind line {lines}: {error}.") from error
    copy.flush()
    return copy


# --- tables with types ------------------------------------------------------------------------------------------------


def in_full(cells: Sequence[Any], kind: pyarrow.DataType) -> list[Any]:
    """The cells of a column of a typed table as they are written out: decimals with all their digits and no exponent;
    dates, times and truths as text; short floats as the number with the fewest digits; any other as it is."""
    if pyarrow.types.is_float32(kind):  # 0.1, which as a number of twice the length is 0.10000000149011612
        texts = pyarrow.array(cells, kind).cast(pyarrow.string()).to_pylist()
        return [text and float(text) for text in texts]
    return [_in_full(cell) for cell in cells]


def _in_full(cell: Any) -> Any:
    if isinstance(cell, Decimal):
        return format(cell, "f")
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(cell) if isinstance(cell, date | time) else cell  # a datetime is a date, and pandas' is a datetime


def table_rows(file: Path, written: Collection[str]) -> tuple[int, Generator[Row]]:
    """The number of rows of a file, and the rows in order, as `TextTable` gives them, or from Parquet. One of another
    ending is read as JSON Lines.

    Args:
        written: columns whose cells are given as they are written, or in full.

    Raises:
        ValueError: no such file, or a line that cannot be read, by its number.
    """
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    if format_of(file) == "parquet":
        return int(parquet.read_metadata(file).num_rows), _parquet_rows(file, written)
    table = TextTable(file, written)
    return len(table), (row for row in table.read(range(len(table))))


def _parquet_rows(file: Path, written: Collection[str]) -> Generator[Row]:
    with parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=512):
            columns = {
                field.name: in_full(cells, field.type) if field.name in written else cells
                for field, cells in zip(batch.schema, map(pyarrow.Array.to_pylist, batch.columns), strict=True)
            }
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
