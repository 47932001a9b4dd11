"""Files of rows, JSONL or Parquet, read and written in memory that does not grow with their length."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")


def require_rows(file: Path) -> None:
    """Refuses a file that is not there or of a kind that cannot be read."""
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    if file.suffix not in (*JSON_ENDINGS, ".parquet"):
        raise ValueError(f"{file} is neither {', '.join(JSON_ENDINGS)} nor .parquet.")


def count_rows(file: Path) -> int:
    """Rows of the file, without reading a Parquet file or holding a JSONL file in memory."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]

        return int(parquet.read_metadata(file).num_rows)
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def read_rows(file: Path) -> Generator[dict[str, Any]]:
    """The rows of a JSONL or Parquet file, one after the other."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]

        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=512):
                yield from batch.to_pylist()
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(line, f"{file}:{number}")


def _json_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not an object with columns, but {type(row).__name__}.")
    return row


class RowWriter:
    """A JSONL file that appears under its name only when it is complete; writes nothing if ``path`` is ``None``."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._staging(self.path).open("w", encoding="utf-8")
            except OSError as error:
                raise ValueError(f"cannot write {self.path}: {error.strerror}.") from error
        return self

    def write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, default=str) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._file is None or self.path is None:
            return
        self._file.close()
        if kind is None:
            self._staging(self.path).replace(self.path)
        else:
            self._staging(self.path).unlink()

    @staticmethod
    def _staging(path: Path) -> Path:
        return path.with_name(f".{path.name}.part")


Row = dict[str, Any]
"""One completion: ``step``, ``prompt``, ``completion``, ``rewards`` (name -> value, status), ``advantage`` …"""


def read_completions(path: Path) -> Iterator[Row]:
    """The rows of a file; a last line that was cut short by a crash is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
