"""Files of rows: JSON Lines read, written and appended to row by row, never whole in memory."""

from __future__ import annotations

import errno
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from grpo_pl.files.writing import append_lines, staged

T = TypeVar("T")
Row = dict[str, Any]
"""One line of a JSON Lines file, one row of a table."""


class Line(NamedTuple):
    """A line that holds a row."""

    number: int
    """From 1; blank lines count."""
    offset: int
    """Bytes of the file before it."""
    row: Row


# --- reading ----------------------------------------------------------------------------------------------------------


def read_lines(
    file: Path, *, may_be_cut_short: bool = False, parse: Callable[[bytes, str], Row] | None = None
) -> Generator[Line]:
    """The rows of a JSON Lines file: one JSON object a line, UTF-8. Blank lines and byte order marks are skipped.

    Args:
        file: the file; only a newline ends a line, so a text may hold other separators, such as U+2028.
        may_be_cut_short: skip a last line that lacks its newline, as a writer that was killed leaves one.
        parse: makes a row of a line and its name; by default `parse_object`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the first line that is no JSON object, with file and number.
    """
    offset = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.removeprefix(BOM_UTF8).strip() and (raw.endswith(b"\n") or not may_be_cut_short):
                yield Line(number, offset, (parse or parse_object)(raw, line_name(file, number)))
            offset += len(raw)


def parsed_lines(
    file: Path, parse: Callable[[Row], T], *, skip: int = 0, may_be_cut_short: bool = False
) -> Generator[T]:
    """What ``parse`` makes of each row, but for those that are skipped at the beginning.

    Raises:
        ValueError: as `read_lines`, or what ``parse`` raises, with file and number.
    """
    for line in islice(read_lines(file, may_be_cut_short=may_be_cut_short), skip, None):
        try:
            yield parse(line.row)
        except ValueError as error:
            raise ValueError(f"{line_name(file, line.number)}: {error}") from error


def line_name(file: Path | str, number: int) -> str:
    """The name of a line in messages."""
    return f"line {number} of {str(file)!r}"


def parse_object(raw: bytes, where: str) -> Row:
    """One JSON object.

    Raises:
        ValueError: anything else; begins with ``where``.
    """
    try:
        tree = json.loads(decoded(raw.removeprefix(BOM_UTF8), where).rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}.") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets nested too deeply
        raise ValueError(f"{where} cannot be read as JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{where} is not a JSON object, but {raw.strip()[:60]!r}.")
    return tree


def parse_row(raw: bytes, where: str, written: Collection[str]) -> Row:
    """One JSON object that is a problem.

    Args:
        written: keys whose numbers and truths are given as they are written where Python would write them otherwise:
            ``1.50`` and ``true`` become texts, 7 stays a number.

    Raises:
        ValueError: as `parse_object`, or one of ``written`` has half a surrogate pair, which no tokenizer takes.
    """
    row = parse_object(raw, where)
    if b"\\u" in raw:
        try:
            json.dumps([row.get(key) for key in written], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where} holds {half!r}, half a surrogate pair, which is no character.") from error
    if any(isinstance(row.get(key), int | float) for key in written):
        texts = json.loads(raw.removeprefix(BOM_UTF8), parse_float=str, parse_int=str, parse_constant=str)
        for key in written:
            value = row.get(key)
            text = str(value).lower() if isinstance(value, bool) else texts.get(key)
            if isinstance(value, int | float) and str(value) != text:
                row[key] = text
    return row


def read_object(file: Path) -> Row:
    """The JSON object that fills a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    return parse_object(file.read_bytes(), str(file))


def decoded(raw: bytes, where: str) -> str:
    """Bytes as text.

    Raises:
        ValueError: they are not UTF-8; begins with ``where``.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        told = f"its byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{where} is not UTF-8: {told}.") from error


def read_rows(file: Path) -> Generator[Row]:
    """The rows of a JSON Lines file, one after the other."""
    for line in read_lines(file):
        yield line.row


# --- writing ----------------------------------------------------------------------------------------------------------


def json_line(row: Mapping[str, Any]) -> str:
    """A row as it stands in a JSON Lines file, newline included. What JSON does not know becomes text."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        text = json.dumps(row, default=str)
    return text + "\n"


def check_output(output: Path, *inputs: Path) -> None:
    """Refuses to write over what is read."""
    if output.resolve() in {file.resolve() for file in inputs}:
        raise ValueError(f"output {output} is the input file: give another name.")


@contextmanager
def row_writer(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Takes the rows of a JSON Lines file that appears under its name only when the block ends without an error.

    Args:
        path: the file; None writes nothing.

    Raises:
        OSError: there can be no such file, or it could not be written; an earlier one is as it was.
    """
    if path is None:
        yield lambda row: None
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"its folder cannot be made: {error.strerror}", str(path)) from error
    with staged(path) as staging, staging.open("w", encoding="utf-8") as file:
        yield lambda row: file.write(json_line(row))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows to the end of a JSON Lines file, all of them or none.

    Raises:
        OSError: they could not be written; the file is as it was.
    """
    append_lines(path, "".join(map(json_line, rows)))


def resume_rows(path: Path) -> list[Row]:
    """The rows that an interrupted `append_rows` left, none where there is no file. Removes a
    last line that was cut short, so that the next row starts on a line of its own."""
    if not path.exists():
        return []
    rows = [line.row for line in read_lines(path, may_be_cut_short=True)]
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    return rows
