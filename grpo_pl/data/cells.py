"""What sources of rows have in common: golds inside cells, equal questions, and the list of a filter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def check_pattern(pattern: str | None) -> None:
    """Refuses an ``answer_pattern`` that cannot find an answer.

    Raises:
        ValueError: no regular expression, one without a group, or None: what YAML makes of ``####`` without quotes.
    """
    if pattern is None:
        raise ValueError(
            "answer_pattern is null: leave it out to take the whole column. What begins with # is a comment in YAML "
            "unless it stands in quotes, such as '####\\s*(.+)'."
        )
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"answer_pattern {pattern!r} is no regular expression: {error}") from error
    if groups < 1:
        raise ValueError(f"answer_pattern {pattern!r} needs a group, such as '####\\s*(.+)'.")


def gold_in(cell: Any, pattern: str) -> str | None:
    """The gold answer in a cell: the first group of the last match of ``pattern``, or all of it; None without one."""
    if not is_text(cell):
        return None
    if not pattern:
        return str(cell).strip() or None
    found = [match[1] for match in re.finditer(pattern, str(cell))]
    return (found[-1] or "").strip() or None if found else None


def read_kept(path: str) -> set[str]:
    """The questions in a file that ``grpo-pl filter`` wrote.

    Raises:
        ValueError: no such file, or a line that is none of a filter, by its number.
    """
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read data.source.kept {path!r}: {error.strerror}.") from error
    questions = set()
    for number, line in enumerate(lines, start=1):
        try:
            questions.add(normal_question(json.loads(line)["question"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of {path!r} was not written by `grpo-pl filter`.") from error
    return questions


def is_text(cell: Any) -> bool:
    """Whether a cell holds something to read."""
    return isinstance(cell, str | int | float) and str(cell).strip() != ""


def normal_question(question: str) -> str:
    """A question without what makes no difference: white space and capitals."""
    return " ".join(question.split()).casefold()


def not_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
    """The complaint about bytes that are no text."""
    return ValueError(f"{where} is not UTF-8: its byte {error.start} is {error.object[error.start]:#04x}.")
