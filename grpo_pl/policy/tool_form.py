"""``ToolForm``: how a policy is told of tools and writes their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.environments.tool_calls import CallParser, HermesCalls
from grpo_pl.policy.dialogue import PlainTurns
from grpo_pl.rewards.trust import FLAG, Untrusted

_TOLD = 'Tools:\n{tools}\nTo call one: <tool_call>{"name": "...", "arguments": {...}}</tool_call>\n\n'
_WITH_TOOLS = ("grpo_pl.environments.tools.ToolEnvironment", "grpo_pl.environments.trl_factory.TRLEnvironment")
_PARSERS = tuple(f"grpo_pl.environments.tool_calls.{name}" for name in ("HermesCalls", "TagCalls"))


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """By default Hermes' form, which most chat models know."""

    parser: CallParser = field(default_factory=HermesCalls)
    """How calls are written."""
    plain: PlainTurns = field(default_factory=lambda: PlainTurns(tools=_TOLD))
    """How turns are written without a chat template."""
    learnt: bool = False
    """Whether the policy was trained in this form, and so may know its tools without being told."""

    @classmethod
    def of(cls, environment: Mapping[str, Any] | None, episodes: Mapping[str, Any], *, trust: bool = False) -> ToolForm:
        """The form of a policy's training; the default one, where there were no tools.

        Args:
            environment: ``class_path`` and ``init_args`` of what it was trained in; nothing of it is imported but the
                parser of calls.
            episodes: settings of its episodes, of which ``plain_turns`` counts here.
            trust: let the parser be any class.

        Raises:
            ValueError: settings that no parser has; Untrusted, if it is none of ours.
        """
        spec, used = environment or {}, episodes.get("plain_turns") or {}
        parser = (spec.get("init_args") or {}).get("parser")
        if spec.get("class_path") in _WITH_TOOLS and parser is None:
            parser = {"class_path": _PARSERS[0]}
        if not isinstance(parser, Mapping) or "class_path" not in parser:
            return cls()
        if parser["class_path"] not in _PARSERS and not trust:
            if spec.get("class_path") in _WITH_TOOLS:
                raise Untrusted(f"the parser {parser['class_path']!r:.100} cannot be imported without {FLAG}.")
            return cls()  # of actions that call nothing, say
        from grpo_pl.config.objects import build

        return cls(parser=build(CallParser, dict(parser), "parser"), plain=PlainTurns(**used), learnt=True)
