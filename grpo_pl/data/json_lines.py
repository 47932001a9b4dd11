"""``JsonLinesPrompts``: a JSON Lines file of any size; lines are read from disk when a step needs them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_pl.data.rows import RowPrompts, RowReader, Side
from grpo_pl.files.rows import Row, line_name, parse_row, read_lines


@dataclass(kw_only=True)
class JsonLinesPrompts(RowPrompts):
    """One line is one problem, read from the file itself.

    ``TablePrompts`` reads such files as well, and there every row has all keys. Here a line may have keys that others
    have not, and problems are numbered by their lines.
    """

    path: str
    """The file: one JSON object a line, UTF-8."""
    val_path: str | None = None
    """A further file to validate on; null holds out ``val_share`` of the lines."""

    def open_rows(self, split: Side) -> RowReader | None:
        path = self.path if split == "train" else self.val_path
        return None if path is None else _LineReader(path, self)


class _LineReader(RowReader):
    unit = "line"

    def __init__(self, name: str, source: RowPrompts) -> None:
        self.name, self.source = name, source
        self.file = Path(name).expanduser()
        if not self.file.is_file():
            raise ValueError(f"there is no file {name!r}.")
        self.folder = self.file.parent

    def scan(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        self.offsets = array("q")  # by number; lines that are blank have that of the next one
        for number, offset, row in read_lines(self.file, parse=self._parse):
            self.source.check_columns(line_name(self.file, number), row)
            self.offsets.extend([offset] * (number + 1 - len(self.offsets)))
            yield number, row

    def read(self, numbers: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        with self.file.open("rb") as lines:
            for number in numbers:
                lines.seek(self.offsets[number])
                where = line_name(self.file, number)
                row = self._parse(lines.readline(), where)
                self.source.check_columns(where, row)
                yield row

    def _parse(self, raw: bytes, where: str) -> Row:
        return parse_row(raw, where, self.source.written_columns())
