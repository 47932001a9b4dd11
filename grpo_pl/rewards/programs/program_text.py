"""Finds the program in a completion."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON = frozenset({"", "python", "python3", "py"})


def last_program(completion: str) -> str | None:
    """The last closed block of Python between two lines of ```` ``` ````, behind the last ``</think>``; None without
    one. Blocks that say another language do not count."""
    text = completion.rpartition("</think>")[2]
    fences = list(_FENCE.finditer(text))
    found: str | None = None
    opening: re.Match[str] | None = None
    for fence in fences:
        if opening is None:
            opening = fence
        elif not fence[1]:  # a fence that names a language opens a block, also where the one before was left open
            if opening[1].lower() in _PYTHON:
                found = text[opening.end() + 1 : fence.start()]
            opening = None
        else:
            opening = fence
    return found
