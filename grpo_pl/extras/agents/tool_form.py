"""``ToolForm``: how prompts describe tools to a policy, and how the policy writes calls of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.environment import listed
from grpo_pl.extras.agents.tool_calls import HERMES, CallParser, HermesCalls
from grpo_pl.moved import defined_name
from grpo_pl.policy.dialogue import PlainTurns
from grpo_pl.rewards.trust import FLAG, Untrusted

_WITH_TOOLS = tuple(
    f"grpo_pl.extras.agents.{name}"
    for name in (
        "tools.ToolEnvironment",
        "trl_factory.TRLEnvironment",
        "openai_agent.AgentEnvironment",
        "verifiers_tasksets.VerifiersEnvironment",
        "inspect_tasks.InspectEnvironment",
    )
)
_PARSERS = tuple(f"grpo_pl.extras.agents.tool_calls.{name}" for name in ("HermesCalls", "TagCalls"))


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """The form of tools and calls; by default that of Hermes, which most chat models know."""

    parser: CallParser = field(default_factory=HermesCalls)
    """Reads and writes calls."""
    plain: PlainTurns = field(default_factory=lambda: PlainTurns(tools=f"{HERMES}\n\n"))
    """Format of turns without a chat template."""

    def told(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Description of tools in the system message, for a chat template that has no place for them."""
        return self.plain.tools.replace("{tools}", listed(tools)).strip() or self.parser.told(tools)

    @classmethod
    def of(cls, environment: Mapping[str, Any] | None, episodes: Mapping[str, Any], *, trust: bool = False) -> ToolForm:
        """The form of a policy's training, or the default form if that had no tools.

        Args:
            environment: ``class_path`` and ``init_args`` of the environment of the training; only its parser of calls
                is imported.
            episodes: settings of the episodes of the training; only ``plain_turns`` is used.
            trust: allow any class as the parser.

        Raises:
            ValueError: settings that the parser does not have.
            Untrusted: the parser is not one of grpo_pl, and ``trust`` is false.
        """
        spec, used = environment or {}, episodes.get("plain_turns") or {}
        parser = (spec.get("init_args") or {}).get("parser")
        with_tools = defined_name(str(spec.get("class_path"))) in _WITH_TOOLS
        if with_tools and parser is None:
            parser = {"class_path": _PARSERS[0]}
        if isinstance(parser, str):
            parser = {"class_path": parser}
        if not isinstance(parser, Mapping) or "class_path" not in parser:
            return cls()
        if defined_name(str(parser["class_path"])) not in _PARSERS and not trust:
            if with_tools:
                raise Untrusted(f"the parser {parser['class_path']!r:.100} cannot be imported without {FLAG}.")
            return cls()  # its environment may have actions that are no calls
        from grpo_pl.config.objects import build

        plain = build(PlainTurns, dict(used), "episodes.plain_turns")
        return cls(parser=build(CallParser, dict(parser), "parser"), plain=plain)
