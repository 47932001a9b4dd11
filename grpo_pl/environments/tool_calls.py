"""How a policy writes the call of a tool, and how the result is told to it: a parser is an argument of environments."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from grpo_pl.environments.base import Observation, Step


class Call(NamedTuple):
    """One call that a policy wrote; a malformed one has a ``fault`` that it is told about."""

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""


class Result(NamedTuple):
    """What came of a call."""

    name: str
    text: str
    failed: bool = False


class CallParser(ABC):
    """Finds calls in what a policy wrote, and words their results."""

    role: ClassVar[str] = "user"
    """Of the messages that tell results; a text is the user's."""

    @abstractmethod
    def calls(self, action: str, tools: Mapping[str, Callable[..., Any]]) -> list[Call]:
        """All calls, malformed ones included, in their order; empty where the action is an answer."""

    @abstractmethod
    def observation(self, results: Sequence[Result]) -> Observation:
        """What the policy is told."""

    def check(self, tools: Mapping[str, Callable[..., Any]]) -> None:  # noqa: B027 - most call any tool
        """Refuses tools that cannot be called this way.

        Raises:
            ValueError: which, and why.
        """


@dataclass(kw_only=True)
class HermesCalls(CallParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write it; results: tool messages."""

    role: ClassVar[str] = "tool"

    def calls(self, action: str, tools: Mapping[str, Callable[..., Any]]) -> list[Call]:
        found = []
        for part in action.split("<tool_call>")[1:]:
            body, closed, _ = part.partition("</tool_call>")
            found.append(_read(body) if closed else Call("", {}, "the call is not closed by </tool_call>"))
        return found

    def observation(self, results: Sequence[Result]) -> Observation:
        return [
            {"role": "tool", "name": r.name, "content": f"Error: {r.text}" if r.failed else r.text} for r in results
        ]


def _read(body: str) -> Call:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not JSON: {error}")
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("", {}, 'a call must be {"name": …, "arguments": {…}}')
    return Call(name, arguments)


@dataclass(kw_only=True)
class TagCalls(CallParser):
    """``<calc>12*7</calc>``: the tag is the tool, the text its only argument; answered by ``<result>84</result>``."""

    result: str = "<result>{text}</result>"
    """How a result is told."""
    error: str = "<error>{text}</error>"
    """How a failure is told."""

    def check(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        for name, tool in tools.items():
            needed = [p for p in inspect.signature(tool).parameters.values() if p.default is p.empty]
            if len(needed) > 1 or not inspect.signature(tool).parameters:
                raise ValueError(f"a call in tags gives one argument, and {name!r} needs {len(needed)}.")

    def calls(self, action: str, tools: Mapping[str, Callable[..., Any]]) -> list[Call]:
        found: list[Call] = []
        opened = re.compile(f"<({'|'.join(map(re.escape, tools))})>")
        at = 0
        while match := opened.search(action, at):
            name, closing = match[1], f"</{match[1]}>"
            end = action.find(closing, match.end())
            if end < 0:
                return [*found, Call(name, {}, f"the call is not closed by {closing}")]
            parameter = next(iter(inspect.signature(tools[name]).parameters))
            found.append(Call(name, {parameter: action[match.end() : end]}))
            at = end + len(closing)
        return found

    def observation(self, results: Sequence[Result]) -> Observation:
        return "\n".join((self.error if r.failed else self.result).replace("{text}", r.text) for r in results)


def answered(
    action: str,
    tools: Mapping[str, Callable[..., Any]],
    parser: CallParser,
    run: Callable[[Call], Result],
    finish: Callable[[], float],
) -> Step:
    """A turn with tools: the results of its calls, or errors for those that cannot be made; without any, the end.

    Args:
        run: makes a call.
        finish: the reward of an episode that ends.
    """
    calls = parser.calls(action, tools)
    if not calls:
        return "", finish(), True, False, {}
    faults = [call.fault or _unknown(call, tools) for call in calls]
    results = [
        Result(call.name, fault, failed=True) if fault else run(call) for call, fault in zip(calls, faults, strict=True)
    ]
    info = {"invalid_action": any(call.fault for call in calls), "calls": [call.name for call in calls]}
    return parser.observation(results), 0.0, False, False, info


def _unknown(call: Call, tools: Mapping[str, Callable[..., Any]]) -> str:
    """What is wrong with the name or arguments of a call; empty where it can be made."""
    if call.name not in tools:
        return f"there is no tool {call.name[:100]!r}; tools: {', '.join(tools)}"
    try:
        inspect.signature(tools[call.name]).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"[:300]
    return ""
