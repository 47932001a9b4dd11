"""What the server writes to its log: a bounded number of lines a second, and requests as JSON where that is wanted."""

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
    """Lets at most ``per_second`` records through in a second, and says with the next one how many were left out."""

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
    """Whether a record is about a fault of the server; an ``ApiError`` is an answer that a client gets."""
    return record.exc_info is None or not isinstance(record.exc_info[1], ApiError)


def configure_logs() -> None:
    """Warnings and errors of this process and its libraries, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(LineLimit(per_second=20))
    handler.addFilter(_is_a_fault)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def open_access_log() -> None:
    """One line of JSON per request on standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _access.addHandler(handler)
    _access.setLevel(logging.INFO)
    _access.propagate = False


def log_request(**fields: Any) -> None:
    """Where an access log was opened: when, and ``fields``."""
    if _access.isEnabledFor(logging.INFO):
        _access.info(json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}))
