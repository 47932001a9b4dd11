"""Calls told from text, however the text is cut into pieces."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_pl.extras.agents.call_reader import CallReader
from grpo_pl.extras.agents.tool_calls import Call, CallParser, HermesCalls, Result, TagCalls

CALC = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {"e": {"type": "string"}}}},
}
TOOLS = {"calc": CALC, "look": {"type": "function", "function": {"name": "look"}}}
TAGGED = '<tool_call>{"name": "calc", "arguments": {"e": "</tool_call> <tool_call>"}}</tool_call>'
HERMES = '<tool_call>{"name": "calc", "arguments": {"e": "1<2"}}</tool_call>'


def read(parser: CallParser, text: str, size: int, **options: Any) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """The text beside calls, the calls, and what was sent at each step."""
    reader = CallReader(parser, TOOLS, **{"several": True, **options})
    sent = [reader.push(text[at : at + size]) for at in range(0, len(text), size)] + [reader.push("", final=True)]
    assert "".join(sent) == reader.text
    return reader.text, [(call.name, json.loads(call.arguments)) for call in reader.calls], sent


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "beside", "calls"),
    [
        ("84", "84", []),
        (HERMES, "", [("calc", {"e": "1<2"})]),
        (f"<think>so</think>\n{HERMES}\n{HERMES}.", "<think>so</think>\n.", [("calc", {"e": "1<2"})] * 2),
        ('a <tool_call>{"name": "look"}</tool_call> b', "a  b", [("look", {})]),
        (f"\n{HERMES}\n \n{HERMES}\n", "\n", [("calc", {"e": "1<2"})] * 2),
        (f"{HERMES}\n then", "\n then", [("calc", {"e": "1<2"})]),
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("<tool_call>{", "<tool_call>{", []),
        (f"<tool_call>{{ {HERMES}", "<tool_call>{ ", [("calc", {"e": "1<2"})]),
        (f"<tool_call>{{</tool_call>{HERMES}", "<tool_call>{</tool_call>", [("calc", {"e": "1<2"})]),
        ('<tool_call>{"name": "other"}</tool_call>x', '<tool_call>{"name": "other"}</tool_call>x', []),
        ('<tool_call>{"name": "calc", "arguments": 5}</tool_call>', None, []),
        ('<tool_call>{"name": "calc", "arguments": {"e": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "calc", "arguments": {"e": 1e999}}</tool_call>', None, []),
        ('<tool_call>{"name": "calc", "arguments": {"e": "\\ud800"}}</tool_call>', None, []),
        ('<tool_call>{"name": "calc", "arguments": {"\\udfff": 1}}</tool_call>', None, []),
        ("<tool_call></tool_call></tool_call>", None, []),
        (f"a{TAGGED} b{HERMES}", "a b", [("calc", {"e": "</tool_call> <tool_call>"}), ("calc", {"e": "1<2"})]),
        (
            f'<tool_call>{{"name": "x}}</tool_call> b{HERMES}',
            '<tool_call>{"name": "x}</tool_call> b',
            [("calc", {"e": "1<2"})],
        ),
        ('<tool_call>{"name": "x}</tool_call> b', None, []),
    ],
)
def test_calls_leave_the_text_and_what_is_none_stays(
    text: str, beside: str | None, calls: list[tuple[str, Any]], size: int
) -> None:
    assert read(HermesCalls(), text, size)[:2] == (text if beside is None else beside, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "beside", "calls"),
    [
        ("so <calc>12*7</calc> and <calc>1/4</calc>.", "so  and .", [("calc", {"e": "12*7"}), ("calc", {"e": "1/4"})]),
        ("<calc>a</look></calc>", "", [("calc", {"e": "a</look>"})]),
        ("<other>1</other><calc>1", "<other>1</other><calc>1", []),
    ],
)
def test_so_do_calls_in_tags(text: str, beside: str, calls: list[tuple[str, Any]], size: int) -> None:
    tools = {"calc": CALC, "look": CALC}
    reader = CallReader(TagCalls(), tools, several=True)
    for at in range(0, len(text), size):
        reader.push(text[at : at + size])
    reader.push("", final=True)
    assert (reader.text, [(c.name, json.loads(c.arguments)) for c in reader.calls]) == (beside, calls)


def test_text_is_sent_as_soon_as_it_can_be_no_call() -> None:
    sent = read(HermesCalls(), f"ab<c <tool_x {HERMES}z", 1)[2]
    assert sent[:3] == ["a", "b", ""] and sent[3] == "<c" and sent[4:10] == [" ", "", "", "", "", ""]
    assert sent[-2:] == ["z", ""]


def test_after_the_only_call_nothing_follows() -> None:
    assert read(HermesCalls(), f"a{HERMES}b{HERMES}", 1, several=False)[:2] == ("a", [("calc", {"e": "1<2"})])


def test_every_call_has_an_id_of_its_own() -> None:
    reader = CallReader(HermesCalls(), TOOLS, several=True)
    reader.push(HERMES * 3)
    assert len({call.id for call in reader.calls}) == 3


def test_brackets_without_end_stay_text() -> None:
    for depth in (100, 900, 990, 2000, 100_000):
        text = f'<tool_call>{{"name": "calc", "arguments": {{"e": {"[" * depth}{"]" * depth}}}}}</tool_call>'
        beside, calls, _ = read(HermesCalls(), text, 1000)
        assert (beside, len(calls)) in ((text, 0), ("", 1))
    assert beside == text


class Shouted(CallParser):
    """``CALC!12*7`` up to the end: says neither tags nor places."""

    def calls(self, action: str, tools: Any) -> list[Call]:
        return [Call("calc", {"e": action[5:]})] if action.startswith("CALC!") else []

    def observation(self, results: Sequence[Result]) -> str:
        return results[0].text


def test_a_parser_that_knows_no_tags_is_asked_at_the_end() -> None:
    text, calls, sent = read(Shouted(), "CALC!12*7", 3)
    assert (text, calls, sent[:-1]) == ("CALC!12*7", [("calc", {"e": "12*7"})], ["", "", ""])
    assert read(Shouted(), "twelve", 3)[:2] == ("twelve", [])


def test_an_open_call_of_any_length_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    parser = HermesCalls()
    monkeypatch.setattr(parser, "calls", lambda *a: asked.append(a) or HermesCalls().calls(*a))
    reader = CallReader(parser, TOOLS, several=True)
    for character in "<tool_call>" + "x" * 5000:
        reader.push(character)
    assert asked == [] and reader.push("", final=True) == "<tool_call>" + "x" * 5000
