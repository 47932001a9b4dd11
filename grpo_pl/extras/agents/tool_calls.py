"""Forms in which a policy writes calls of tools and reads results; environments take one as ``parser``."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from grpo_pl.environment import Environment, Observation, Step, listed

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or its JSON schema as chat templates take it: ``{"type": "function", "function": {…}}``."""


class Call(NamedTuple):
    """One call that a policy wrote; a malformed one has a ``fault`` that it is told about."""

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""
    span: tuple[int, int] = (0, 0)
    """Its begin and end in the action."""
    open: bool = False
    """The action ended within it, so that more text may still mend the fault."""


class Result(NamedTuple):
    """The result of a call."""

    name: str
    text: str
    failed: bool = False


class CallParser(ABC):
    """Finds calls in what a policy wrote, and words their results."""

    role: ClassVar[str] = "user"
    """Of the messages that tell results; a text is the user's."""

    @abstractmethod
    def calls(self, action: str, tools: Mapping[str, Tool]) -> list[Call]:
        """All calls, malformed ones included, in their order; empty where the action is an answer."""

    @abstractmethod
    def observation(self, results: Sequence[Result]) -> Observation:
        """Text for the policy."""

    def check(self, tools: Mapping[str, Tool]) -> None:  # noqa: B027 - most call any tool
        """Refuses tools that cannot be called this way.

        Raises:
            ValueError: which, and why.
        """

    def told(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The system message's text about tools and their calls, where the chat template has no place for them.

        Args:
            tools: their JSON schemas.
        """
        return "Tools:\n" + listed(tools)

    def tags(self, tools: Mapping[str, Tool]) -> Sequence[tuple[str, str]]:
        """Begin and end marks of calls; without any, a text must be complete before calls can be looked for."""
        return ()

    def written(self, call: Call) -> str:
        """A call as a policy writes it.

        Raises:
            ValueError: it cannot be written like this.
        """
        raise ValueError(f"{type(self).__name__} does not say how calls are written.")

    def grammar(self, rule: str, name: str, tool: Mapping[str, Any]) -> str:
        """Lark rules, the first of them ``rule``, that calls of a tool follow (llguidance's dialect).

        Raises:
            ValueError: there are none.
        """
        raise ValueError(f"{type(self).__name__} has no grammar that calls could be held to.")


HERMES = 'Tools:\n{tools}\nTo call one: <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
"""Tells of tools, whose schemas replace ``{tools}``, and of calls in Hermes' form."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_UNCLOSED = f"the call is not closed by {_CLOSE}"


@dataclass(kw_only=True)
class HermesCalls(CallParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write it; results: tool messages."""

    role: ClassVar[str] = "tool"

    def calls(self, action: str, tools: Mapping[str, Tool]) -> list[Call]:
        found = []
        start = action.find(_OPEN)
        while start >= 0:
            found.append(_hermes_call(action, start))
            start = action.find(_OPEN, found[-1].span[1])
        return found

    def told(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return HERMES.replace("{tools}", listed(tools))

    def tags(self, tools: Mapping[str, Tool]) -> Sequence[tuple[str, str]]:
        return ((_OPEN, _CLOSE),)

    def written(self, call: Call) -> str:
        return f"{_OPEN}{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}{_CLOSE}"

    def grammar(self, rule: str, name: str, tool: Mapping[str, Any]) -> str:
        before, after = json.dumps(f'{{"name": "{name}", "arguments": '), json.dumps("}")
        schema = {
            "type": "object",
            **tool["function"].get("parameters", {}),
            "x-guidance": {"whitespace_pattern": " ?"},
        }
        return (
            f'{rule}: "{_OPEN}" "\\n"? {before} {rule}_arguments {after} "\\n"? "{_CLOSE}"\n'
            f"{rule}_arguments: %json {json.dumps(schema)}"
        )

    def observation(self, results: Sequence[Result]) -> Observation:
        return [
            {"role": "tool", "name": r.name, "content": f"Error: {r.text}" if r.failed else r.text} for r in results
        ]


def _hermes_call(action: str, start: int) -> Call:
    """The call that opens at ``start``; tags inside of its texts are part of them."""
    begin = _BLANKS.match(action, start + len(_OPEN)).end()  # type: ignore[union-attr]
    try:
        value, end = _DECODER.raw_decode(action, begin)
        end = _BLANKS.match(action, end).end()  # type: ignore[union-attr]
        if action.startswith(_CLOSE, end):
            return _checked(value)._replace(span=(start, end + len(_CLOSE)))
        fault = f"the call is not JSON: {_CLOSE} must follow it"
    except json.JSONDecodeError as error:
        fault = f"the call is not JSON: {error.msg}: char {error.pos - begin}"
        if error.msg.startswith("Unterminated string"):  # up to the end of the action, with all tags in it
            closed = action.find(_CLOSE, begin) >= 0
            return Call("", {}, fault if closed else _UNCLOSED, (start, len(action)), open=True)
    except (ValueError, RecursionError) as error:
        fault = f"the call is not JSON: {error}"
    following = action.find(_OPEN, start + len(_OPEN))
    limit = following if following >= 0 else len(action)
    closing = action.find(_CLOSE, start + len(_OPEN), limit)
    if closing < 0:
        return Call("", {}, _UNCLOSED, (start, limit), open=following < 0)
    return Call("", {}, fault, (start, closing + len(_CLOSE)))


def _checked(call: Any) -> Call:
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("", {}, 'a call must be {"name": …, "arguments": {…}}')
    return Call(name, arguments)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


_DECODER, _BLANKS = json.JSONDecoder(parse_constant=_no_number), re.compile(r"[ \t\n\r]*")


@dataclass(kw_only=True)
class TagCalls(CallParser):
    """``<calc>12*7</calc>``: the tag is the tool, the text its only argument; answered by ``<result>84</result>``."""

    result: str = "<result>{text}</result>"
    """Form of a result."""
    error: str = "<error>{text}</error>"
    """Form of a failure."""

    def check(self, tools: Mapping[str, Tool]) -> None:
        for name, tool in tools.items():
            needed = _parameters(tool)
            if sum(needed.values()) > 1 or not needed:
                raise ValueError(f"a call in tags gives one argument, and {name!r} needs {sum(needed.values())}.")

    def calls(self, action: str, tools: Mapping[str, Tool]) -> list[Call]:
        found: list[Call] = []
        opened = re.compile(f"<({'|'.join(map(re.escape, tools))})>")
        at = 0
        while match := opened.search(action, at):
            name, closing = match[1], f"</{match[1]}>"
            end = action.find(closing, match.end())
            if end < 0:
                span = (match.start(), len(action))
                return [*found, Call(name, {}, f"the call is not closed by {closing}", span, open=True)]
            at = end + len(closing)
            found.append(Call(name, {_argument(tools[name]): action[match.end() : end]}, span=(match.start(), at)))
        return found

    def told(self, tools: Sequence[Mapping[str, Any]]) -> str:
        lines = []
        for tool in tools:
            function, argument = tool["function"], _argument(tool)
            about = function.get("parameters", {}).get("properties", {}).get(argument, {}).get("description", "")
            described = " ".join(filter(None, (function.get("description", ""), about and f"{argument}: {about}")))
            lines.append(f"<{function['name']}>{argument}</{function['name']}>{described and f' {described}'}")
        return "To call a tool, write its argument between its tags:\n" + "\n".join(lines)

    def tags(self, tools: Mapping[str, Tool]) -> Sequence[tuple[str, str]]:
        return [(f"<{name}>", f"</{name}>") for name in tools]

    def written(self, call: Call) -> str:
        if len(call.arguments) != 1:
            raise ValueError(f"a call in tags gives one argument, and that of {call.name!r} has {len(call.arguments)}.")
        (value,) = call.arguments.values()
        return f"<{call.name}>{value if isinstance(value, str) else json.dumps(value)}</{call.name}>"

    def grammar(self, rule: str, name: str, tool: Mapping[str, Any]) -> str:
        return f'{rule}: "<{name}>" {rule}_argument\n{rule}_argument[suffix="</{name}>"]: /(.|\\n)*/'

    def observation(self, results: Sequence[Result]) -> Observation:
        return "\n".join((self.error if r.failed else self.result).replace("{text}", r.text) for r in results)


def _parameters(tool: Tool) -> dict[str, bool]:
    """Names of a tool's parameters, and whether each must be given."""
    if callable(tool):
        return {p.name: p.default is p.empty for p in inspect.signature(tool).parameters.values()}
    schema = tool["function"].get("parameters", {})
    return {name: name in schema.get("required", ()) for name in schema.get("properties", {})}


def _argument(tool: Tool) -> str:
    """The parameter that a call in tags gives: the needed one, or else the first."""
    needed = _parameters(tool)
    return max(needed, key=lambda parameter: needed[parameter])


@dataclass(kw_only=True)
class CallsTools(Environment):
    """Base of environments in which the policy calls tools."""

    parser: CallParser = field(default_factory=HermesCalls)
    """Form in which the policy writes calls of tools and reads results."""

    def __post_init__(self) -> None:
        if self.parser is None:  # as jsonargparse lets it be
            raise ValueError(
                "parser is null: name the form of calls, such as grpo_pl.extras.agents.tool_calls.HermesCalls, or "
                "leave parser out, which takes that one. Where no tool is offered, none is read."
            )

    @property
    def told_tools(self) -> str:
        return self.parser.told(self.tool_schemas) if self.tool_schemas else ""

    @property
    def observation_role(self) -> str:
        return self.parser.role

    def answered(
        self,
        action: str,
        tools: Mapping[str, Callable[..., Any]],
        run: Callable[[Call], Result],
        *,
        most: int | None = None,
    ) -> Step:
        """A turn: the results of its calls, or errors for those that cannot be made; without any, the end.

        Args:
            run: makes a call.
            most: calls that are made; those after them are answered by an error.
        """
        calls = self.parser.calls(action, tools)
        if not calls:
            return "", self.finish(), True, False, {}
        results = []
        for number, call in enumerate(calls):
            over = f"only {most} calls an action are made" if most is not None and number >= most else ""
            fault = over or call.fault or _unknown(call, tools)
            result = Result(call.name, fault, failed=True) if fault else run(call)
            results.append(Result(_writable(result.name), _writable(result.text), result.failed))
        info = {"invalid_action": any(call.fault for call in calls), "calls": [result.name for result in results]}
        return self.parser.observation(results), 0.0, False, False, info


def _writable(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON can say and no tokenizer and no file can take."""
    return text.encode("utf-8", "replace").decode()


def _unknown(call: Call, tools: Mapping[str, Callable[..., Any]]) -> str:
    """The fault in the name or arguments of a call; empty where it can be made."""
    if call.name not in tools:
        return f"there is no tool {call.name[:100]!r}; tools: {', '.join(tools)}"
    try:
        inspect.signature(tools[call.name]).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"[:300]
    return ""
