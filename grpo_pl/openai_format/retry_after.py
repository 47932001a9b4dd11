"""``retry_after``: how long a busy server asks its client to wait."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_WAIT_S = 60.0
"""Most that is waited, whatever a server asks."""
_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?")  # float() would also take nan, inf, 1e9 and -1


def retry_after(header: str | None, otherwise: float, *, now: datetime | None = None) -> float:
    """Reads a ``Retry-After`` header as seconds, 0 to ``LONGEST_WAIT_S``; a time that has passed is 0.

    Args:
        header: a number of seconds or an HTTP date (RFC 9110, section 10.2.3); None where there is none.
        otherwise: the seconds where the header is missing or neither of these.
        now: the time that a date counts from; by default the clock's.
    """
    text = (header or "").strip()
    if _SECONDS.fullmatch(text):
        wait = float(text)
    else:
        try:
            then = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError, OverflowError):  # what comes from a server may be anything
            wait = otherwise
        else:
            then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
            wait = (then - (now or datetime.now(UTC))).total_seconds()
    return min(max(wait, 0.0), LONGEST_WAIT_S)
