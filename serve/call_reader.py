"""``CallReader``: tells calls of tools from text while an answer grows."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_pl.environments.tool_calls import Call, CallParser


class MadeCall(NamedTuple):
    """A call as clients read it."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Reads one answer. What the policy's parser finds fault with, and calls of other tools, stay text.

    Args:
        parser: that of training; it sees a text again only when a call may have ended in it.
        tools: JSON schemas, by name.
        several: whether an answer may hold more than one call; else it is over after the first.
    """

    def __init__(self, parser: CallParser, tools: Mapping[str, Mapping[str, Any]], *, several: bool) -> None:
        self._parser, self._tools, self.several = parser, tools, several
        self._tags = parser.tags(tools)
        self._opening = re.compile("|".join(re.escape(opening) for opening, _ in self._tags))
        self._overlap = max((len(closing) for _, closing in self._tags), default=1) - 1
        self._held = ""  # what may be, or become, a call
        self.text = ""
        """What is no call."""
        self.calls: list[MadeCall] = []

    @property
    def full(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.calls) and not self.several

    def push(self, text: str, *, final: bool = False) -> str:
        """Takes more of the answer; returns what is new in ``text``."""
        if self.full:
            return ""
        before, self._held = len(self.text), self._held + text
        if final or self._may_have_ended(len(text)):
            self._read(final=final)
        if not self.full:
            end = len(self._held) if final else self._first_opening()
            self.text, self._held = self.text + self._held[:end], self._held[end:]
        return self.text[before:]

    def _may_have_ended(self, new: int) -> bool:
        tail = self._held[-(new + self._overlap) :]
        return any(closing in tail for _, closing in self._tags)

    def _read(self, *, final: bool) -> None:
        at = 0
        for call in self._parser.calls(self._held, self._tools):
            start, end = call.span
            if not final and end == len(self._held) and not self._is_closed(self._held[start:end]):
                break  # it may still be closed
            if (made := self._made(call)) is not None:
                self.text += self._held[at:start]
                self.calls.append(made)
                at = end
                if self.full:
                    break
            else:
                self.text += self._held[at:end]
                at = end
        self._held = self._held[at:]

    def _is_closed(self, part: str) -> bool:
        return any(part.startswith(opening) and part.endswith(closing) for opening, closing in self._tags)

    def _made(self, call: Call) -> MadeCall | None:
        if call.fault or call.name not in self._tools:
            return None
        try:
            arguments = json.dumps(call.arguments, allow_nan=False)
        except ValueError:  # a number as large as no JSON number
            return None
        return MadeCall(f"call_{uuid.uuid4().hex[:24]}", call.name, arguments)

    def _first_opening(self) -> int:
        """Where a call begins, or may once more has come."""
        if not self._tags:
            return 0
        if found := self._opening.search(self._held):
            return found.start()
        longest = max(len(opening) for opening, _ in self._tags)
        for begin in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(opening.startswith(self._held[begin:]) for opening, _ in self._tags):
                return begin
        return len(self._held)
