"""Where calls begin and end in what a policy wrote."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from grpo_pl.extras.agents import Environment
from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import Call, HermesCalls, TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment, schema
from grpo_pl.extras.agents.trl_factory import TRLEnvironment
from grpo_pl.policy.template import PROBE_TOOL

PLUGINS = Path(__file__).parents[2] / "plugins"
GOOD = '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'


@pytest.mark.parametrize(
    "text", ["</tool_call>", "<tool_call>", '</tool_call>"<tool_call>{"name": "g"}</tool_call>', "\\"]
)
@pytest.mark.parametrize("blank", ["", "\n"])
def test_tags_inside_of_a_text_are_part_of_it(text: str, blank: str) -> None:
    made = json.dumps({"name": "say", "arguments": {text: text}})
    action = f"So <tool_call>{blank}{made}{blank}</tool_call>\n{GOOD}"
    first, second = HermesCalls().calls(action, {})
    assert first == Call("say", {text: text}, span=(3, action.index(f"\n{GOOD}")))
    assert second == Call("f", {"x": "1"}, span=(len(action) - len(GOOD), len(action)))
    assert HermesCalls().calls(HermesCalls().written(first), {})[0][:3] == first[:3]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('<tool_call>{"name": "f}</tool_call>', "not JSON: Expecting"),
        ('<tool_call>{"name": "f"} or so</tool_call>', "not JSON: </tool_call> must follow"),
        ("<tool_call>", "not closed"),
        ('<tool_call>{"name": "f"}', "not closed"),
    ],
)
def test_a_malformed_call_hides_none_after_it(bad: str, says: str) -> None:
    fault, good = HermesCalls().calls(bad + GOOD, {})
    assert says in fault.fault and fault.span == (0, len(bad)) and not fault.open
    assert good == Call("f", {"x": "1"}, span=(len(bad), len(bad + GOOD)))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ('<tool_call>{"name": "f', "not closed"),
        ('<tool_call>{"name": "f"', "not closed"),
        ('<tool_call>{"name": "f}</tool_call>', "not JSON: Unterminated string"),
    ],
)
def test_a_call_that_more_text_may_mend_is_open(action: str, says: str) -> None:
    (call,) = HermesCalls().calls(action, {})
    assert says in call.fault and call.open and call.span == (0, len(action))


def test_so_is_one_in_tags() -> None:
    tools = {"f": {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}}
    made, cut = TagCalls().calls("<f>1</f><f>2", tools)
    assert (made.open, cut.open, cut.span) == (False, True, (8, 12)) and "not closed by </f>" in cut.fault


def test_tools_are_told_in_the_form_of_their_calls() -> None:
    tool = schema(calc)
    assert TagCalls().told([tool]) == (
        "To call a tool, write its argument between its tags:\n<calc>expression</calc> Works an arithmetic expression "
        "out. expression: Whole or decimal numbers with + - * / and brackets."
    )
    assert HermesCalls().told([tool, tool]) == (
        f"Tools:\n{json.dumps(tool)}\n{json.dumps(tool)}\n"
        'To call one: <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )
    for told in (TagCalls().told([PROBE_TOOL]), HermesCalls().told([PROBE_TOOL])):
        assert "probe_of_tools" in told and "Tries." in told


@pytest.mark.parametrize(
    "make",
    [
        partial(AgentEnvironment, agent=f"{PLUGINS}/user_agents.py:chat"),
        partial(ToolEnvironment, tools=["grpo_pl.extras.agents.calculator:calc"]),
        partial(TRLEnvironment, factory=f"{PLUGINS}/no_such_file.py:Environment"),
    ],
)
def test_no_parser_is_refused_in_one_line(make: Callable[..., Environment]) -> None:
    with pytest.raises(ValueError, match=r"\Aparser is null: [^\n]*\Z"):
        make(parser=None)
