"""``CallReader``: separates calls of tools from text while an answer arrives."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from grpo_pl.extras.agents.tool_calls import Call, CallParser
from grpo_pl.openai_format.answers import MadeCall
from grpo_pl.openai_format.json_text import parse_object


class CallReader:
    """Reads one answer. Calls that the policy's parser finds faulty, and calls of unknown tools, remain text; blanks
    after a call are none where no other text follows them.

    Args:
        parser: the parser of the policy's training; it runs only when new text may have ended a call.
        tools: JSON schemas, by name.
        several: whether an answer may hold several calls; otherwise it ends with the first.
    """

    def __init__(self, parser: CallParser, tools: Mapping[str, Mapping[str, Any]], *, several: bool) -> None:
        self._parser, self._tools, self.several = parser, tools, several
        self._tags = parser.tags(tools)
        self._opening = re.compile("|".join(re.escape(opening) for opening, _ in self._tags))
        self._overlap = max((len(closing) for _, closing in self._tags), default=1) - 1
        self._held = ""  # text that is, or may become, a call
        self._blanks: str | None = None  # since the latest call, where nothing else followed it
        self.text = ""
        """The text of the answer without its calls."""
        self.calls: list[MadeCall] = []
        self.text_after = 0
        """Number of calls before the text begins."""

    @property
    def full(self) -> bool:
        """True if the answer ends here: it has a call, and may have only one."""
        return bool(self.calls) and not self.several

    def push(self, text: str, *, final: bool = False) -> str:
        """Adds a piece of the answer; returns what it adds to ``text``. ``final`` marks the last piece."""
        if self.full:
            return ""
        before, self._held = len(self.text), self._held + text
        new = self._held[-(len(text) + self._overlap) :]
        if final or any(closing in new for _, closing in self._tags):
            self._read(final=final)
        if not self.full:
            end = len(self._held) if final else self._first_opening()
            self._say(self._held[:end])
            self._held = self._held[end:]
        return self.text[before:]

    def _read(self, *, final: bool) -> None:
        at = 0
        for call in self._parser.calls(self._held, self._tools):
            start, end = call.span
            written = self._held[start:end]
            closed = any(written.startswith(opening) and written.endswith(closing) for opening, closing in self._tags)
            if not final and end == len(self._held) and (call.open or not closed):
                break  # it may still be closed
            if (made := self._made(call)) is not None:
                self._say(self._held[at:start])
                self.calls.append(made)
                self._blanks, at = "", end
                if self.full:
                    break
            else:
                self._say(self._held[at:end])
                at = end
        self._held = self._held[at:]

    def _say(self, text: str) -> None:
        if self._blanks is not None and not text.strip():
            self._blanks += text
            return
        text, self._blanks = (self._blanks or "") + text, None
        if text and not self.text:
            self.text_after = len(self.calls)
        self.text += text

    def _made(self, call: Call) -> MadeCall | None:
        if call.fault or call.name not in self._tools:
            return None
        try:
            arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
            parse_object(arguments.encode())  # what the server would refuse when the client sends the call back
        except (ValueError, RecursionError):  # no JSON number, half a character, brackets without end
            return None
        return MadeCall(f"call_{uuid.uuid4().hex[:24]}", call.name, arguments)

    def _first_opening(self) -> int:
        """The offset in the held text where a call begins, or may begin once more text arrives."""
        if not self._tags:
            return 0
        if found := self._opening.search(self._held):
            return found.start()
        longest = max(len(opening) for opening, _ in self._tags)
        for begin in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(opening.startswith(self._held[begin:]) for opening, _ in self._tags):
                return begin
        return len(self._held)
