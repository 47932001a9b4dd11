"""How long a busy server asks its client to wait."""

from datetime import UTC, datetime

import pytest

from grpo_pl.openai_format.retry_after import retry_after

NOW = datetime(2025, 3, 9, 12, 0, 0, tzinfo=UTC)  # a Sunday


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("5", 5.0), (" 2.5 ", 2.5), ("0", 0.0), ("61", 60.0), ("9" * 400, 60.0), ("Sun, 09 Mar 2025 12:00:07 GMT", 7.0),
        ("Sun, 09 Mar 2025 13:00:07 +0100", 7.0),  # the same moment
        ("Sun, 09 Mar 2025 12:00:07 -0000", 7.0),  # without a zone: UTC
        ("Sunday, 09-Mar-25 12:00:07 GMT", 7.0),  # the two older forms that RFC 9110 has clients read
        ("Sun Mar  9 12:00:07 2025", 7.0), ("Sun, 09 Mar 2025 11:59:00 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("Mon, 10 Mar 2025 12:00:00 GMT", 60.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
    ],
)  # fmt: skip
def test_seconds_and_dates(header: str, seconds: float) -> None:
    assert retry_after(header, 1.0, now=NOW) == seconds


@pytest.mark.parametrize(
    "header",
    [
        None, "", " ", "-5", "nan", "inf", "-inf", "1e9", "1_0", "5s", "soon", "٣", "Sun, 99 Mar 2025 12:00:07 GMT",
        "Sun, 09 Mar 2025 12:00:07 +99999999999", "Sun, 09 Mar 99999 12:00:07 GMT", ", , ,", "12:00",
    ],
)  # fmt: skip
def test_what_is_neither_says_nothing(header: str | None) -> None:
    assert retry_after(header, 4.0, now=NOW) == 4.0
