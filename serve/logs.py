"""The server's output on its terminal: the log and the optional access log in JSON, which survive a full disk."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from datetime import UTC, datetime
from typing import Any

from serve.errors import ApiError

log = logging.getLogger(__name__)
_access_log = threading.Event()


class Lines:
    """Writes whole lines to a file descriptor; where that fails, on a full disk say, leaves lines out until it works.

    Python's streams would keep what they cannot write, and end with another status; its handlers print a traceback for
    each line.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()
        self._left_out, self._torn = 0, False

    def write(self, line: str) -> tuple[OSError | None, int]:
        """Writes a line; returns the error of the first that fails, and how many had failed before one that works."""
        with self._lock:
            rest = ("\n" * self._torn + line + "\n").encode(errors="backslashreplace")
            size = len(rest)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self._torn = self._torn or len(rest) < size
                self._left_out += 1
                return error if self._left_out == 1 else None, 0
            left_out, self._left_out, self._torn = self._left_out, 0, False
            return None, left_out


_output, _errors = Lines(1), Lines(2)


def write_output(text: str) -> None:
    """Writes to standard output; says once in the log that this fails, and once that it works again."""
    error, left_out = _output.write(text)
    if error is not None:
        log.warning("standard output cannot be written: %s. It is left out until it can.", error.strerror)
    if left_out:
        log.warning("standard output can be written again; %d lines were left out.", left_out)


class _StderrHandler(logging.Handler):
    """Writes records to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _, left_out = _errors.write(self.format(record))
        except Exception:  # as all handlers of `logging`
            self.handleError(record)
            return
        if left_out:
            _errors.write(f"(left out before this line, because they could not be written: {left_out})")


class LineLimit(logging.Filter):
    """Passes at most ``per_second`` records per second; the next one that passes tells how many were left out."""

    def __init__(self, per_second: int) -> None:
        super().__init__()
        self._per_second, self._lock = per_second, threading.Lock()
        self._second, self._count, self._left_out = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            second = int(time.monotonic())
            if second != self._second:
                self._second, self._count = second, 0
            self._count += 1
            if self._count > self._per_second:
                self._left_out += 1
                return False
            left_out, self._left_out = self._left_out, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines before it were left out)", None
        return True


def _is_a_fault(record: logging.LogRecord) -> bool:
    """False for an ``ApiError``, which is an answer to a client and no fault of the server."""
    return record.exc_info is None or not isinstance(record.exc_info[1], ApiError)


def configure_logs() -> None:
    """Sends warnings and errors of this process and its libraries to standard error."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(LineLimit(per_second=20))
    handler.addFilter(_is_a_fault)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def open_access_log() -> None:
    """From now on writes one line of JSON per request to standard output."""
    _access_log.set()


def log_request(**fields: Any) -> None:
    """Writes the time and ``fields`` of a request to the access log, if that was opened."""
    if _access_log.is_set():
        write_output(json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}))
