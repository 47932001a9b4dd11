"""``Verdicts``: what judges decided, kept on disk, so that no run asks the same twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from grpo_pl.files.writing import best_effort

_AT_ONCE = 500  # keys in one query


class Verdicts:
    """A table from digests of questions to yes or no, in one SQLite file that several processes may use at a time."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def known(self, keys: Sequence[bytes]) -> dict[bytes, bool]:
        """The verdicts on those of ``keys`` that have one.

        Raises:
            ValueError: the file is no such table.
        """
        if not keys or not self.file.exists():
            return {}
        found: dict[bytes, bool] = {}
        with self._table() as table:
            for first in range(0, len(keys), _AT_ONCE):
                part = keys[first : first + _AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = table.execute(f"SELECT key, verdict FROM verdicts WHERE key IN ({marks})", part)
                found.update((key, bool(verdict)) for key, verdict in rows)
        return found

    def add(self, verdicts: Mapping[bytes, bool]) -> None:
        """Stores verdicts; if the disk is full, warns and goes on without."""
        if not verdicts:
            return
        with best_effort(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._table() as table:
                table.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", verdicts.items())

    @contextmanager
    def _table(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.file, timeout=60.0)) as connection, connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, verdict INTEGER) WITHOUT ROWID"
                )
                yield connection
        except sqlite3.OperationalError as error:
            raise OSError(f"{error} ({self.file})") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.file} holds no verdicts ({error}): delete it, or name another cache_file."
            ) from error
