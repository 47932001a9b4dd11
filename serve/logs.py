"""The server's log, with a bounded number of lines per second, and the optional access log in JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

from serve.errors import ApiError

_access = logging.getLogger("serve.access")


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
    """Whether a record is about a fault of the server; an ``ApiError`` is an answer to a client, not a fault."""
    return record.exc_info is None or not isinstance(record.exc_info[1], ApiError)


def configure_logs() -> None:
    """Sends warnings and errors of this process and its libraries to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(LineLimit(per_second=20))
    handler.addFilter(_is_a_fault)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def open_access_log() -> None:
    """From now on writes one line of JSON per request to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _access.addHandler(handler)
    _access.setLevel(logging.INFO)
    _access.propagate = False


def log_request(**fields: Any) -> None:
    """Writes the time and ``fields`` of a request to the access log, if that was opened."""
    if _access.isEnabledFor(logging.INFO):
        _access.info(json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}))
