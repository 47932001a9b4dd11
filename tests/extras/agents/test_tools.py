"""Plain functions as tools: every call is answered, whatever it does."""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import user_tools
from user_tools import call

from grpo_pl.extras.agents import EnvironmentPool, PoolLimits, play
from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.tool_calls import Call, HermesCalls, Result, TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.rewards.sandbox.pool import SandboxSettings, Verdict, WorkerPool
from tests.extras.agents.turns import reset, step

TOOLS = [user_tools.multiply, user_tools.echo, user_tools.misbehave]


@pytest.fixture(scope="module")
def environment() -> Any:
    made = ToolEnvironment(tools=TOOLS, time_limit_s=0.5, memory_limit_mb=512, longest_result=100)
    made.prepare()
    yield made
    made.shutdown()


def told(environment: ToolEnvironment, action: str) -> list[str]:
    turn = play(environment, [action])[-1]
    assert turn.status == "ok" and not isinstance(turn.observation, str)
    return [str(message["content"]) for message in turn.observation]


def test_calls_are_answered_in_their_order_by_tool_messages(environment: ToolEnvironment) -> None:
    action = f"<think>both</think>{call('multiply', a=12, b=7)}\n{call('echo', text='so')}"
    turns = play(environment, [action, "84, so."])
    assert turns[1].observation == [
        {"role": "tool", "name": "multiply", "content": "84"},
        {"role": "tool", "name": "echo", "content": "so"},
    ]
    assert turns[1].info["calls"] == ["multiply", "echo"] and not turns[1].invalid_action
    assert turns[2].terminated and turns[2].reward == 0.0


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("<tool_call>{", "not closed"),
        ("<tool_call>{</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "must be"),
        ('<tool_call>{"name": 3}</tool_call>', "must be"),
        ('<tool_call>{"name": "multiply", "arguments": [1, 2]}</tool_call>', "must be"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "echo", "arguments": {"text": NaN}}</tool_call>', "not JSON: NaN is no JSON number"),
        ('<tool_call>{"name": "echo", "arguments": {"text": -Infinity}}</tool_call>', "-Infinity is no JSON number"),
        (call("divide", a=1), "no tool 'divide'; tools: multiply, echo, misbehave"),
        (call("multiply", a=1), "missing a required argument: 'b'"),
        (call("multiply", a=1, b=2, c=3), "unexpected keyword argument 'c'"),
        (call("multiply", a="x", b="y"), "TypeError"),
        (call("misbehave", how="raise"), "RuntimeError: no such luck"),
        (call("misbehave", how="exit"), "SystemExit"),
        (call("misbehave", how="spin"), "over 0.5 s|not done in time"),  # a busy machine gives it little
        (call("misbehave", how="hang"), "not done in time"),
        (call("misbehave", how="hoard"), "MemoryError"),
        (call("\ud800"), "no tool"),
    ],
)
def test_a_call_that_fails_is_answered_by_its_error(environment: ToolEnvironment, action: str, says: str) -> None:
    (content,) = told(environment, action)
    assert content.startswith("Error: ") and re.search(says, content) and len(content) < 400
    assert told(environment, call("multiply", a=2, b=3)) == ["6"]  # the tools are still there


def test_a_long_result_is_cut_off_and_says_so(environment: ToolEnvironment) -> None:
    (content,) = told(environment, call("misbehave", how="long"))
    assert content == "y" * 100 + "… (10000 characters)"


def test_the_same_call_is_made_again(environment: ToolEnvironment) -> None:
    drawn = call("misbehave", how="draw")
    assert told(environment, drawn) != told(environment, drawn)
    one, other = told(environment, drawn + drawn)
    assert one != other


def test_the_calls_of_an_action_share_its_time(environment: ToolEnvironment) -> None:
    hang, good = call("misbehave", how="hang"), call("multiply", a=2, b=3)
    told(environment, good)
    contents = told(replace(environment, action_limit_s=2.0), good + 3 * hang + good)
    assert contents[:2] == ["6", "Error: not done in time"]
    assert contents[-1] == "Error: not called: the calls before took the 2 s of an action"


def test_a_call_that_hangs_holds_no_other_episode_up(environment: ToolEnvironment) -> None:
    """More of them than workers."""
    hang = call("misbehave", how="hang")
    with EnvironmentPool(replace(environment, action_limit_s=10.0), PoolLimits(step_timeout_s=12.0)) as pool:
        reset(pool, *range(20))
        turns = step(pool, {i: hang if i < 4 else call("multiply", a=i, b=2) for i in range(20)})
    assert {turn.status for turn in turns.values()} == {"ok"}
    assert [turns[i].observation[0]["content"] for i in range(4, 20)] == [str(2 * i) for i in range(4, 20)]  # type: ignore[index,call-overload]


def test_a_job_that_waits_for_a_worker_too_long_is_given_up() -> None:
    pool = WorkerPool(SandboxSettings(workers=1, cache_size=0, judge="grpo_pl.rewards.sandbox.tool_call"))
    job = {"arguments": {"how": "hang"}, "path": sys.path, "longest": 10}
    jobs = [("user_tools:misbehave", json.dumps(job | {"longest": longest})) for longest in (10, 11)]
    try:
        assert pool.run(jobs, within_s=1.0) == [
            Verdict("killed", "not done in time"),
            Verdict("timeout", "no worker was free in time"),
        ]
    finally:
        pool.close()


def test_calls_beyond_the_limit_of_an_action_are_not_made(environment: ToolEnvironment) -> None:
    contents = told(replace(environment, most_calls=2), call("multiply", a=2, b=3) * 3 + "<tool_call>")
    assert contents == ["6", "6", *["Error: only 2 calls an action are made"] * 2]


def test_steps_that_could_outlast_the_pools_limit_are_refused(environment: ToolEnvironment) -> None:
    with pytest.raises(ValueError, match=r"ToolEnvironment may take 20 s, and step_timeout_s=20 .* raise step_timeout"):
        EnvironmentPool(environment, PoolLimits(step_timeout_s=20.0)).start()


def test_halves_of_surrogate_pairs_are_replaced(environment: ToolEnvironment) -> None:
    turn = play(environment, [call("echo", text="a\ud800") + call("\ud800")])[-1]
    assert turn.status == "ok" and turn.info["calls"] == ["echo", "?"]
    assert [(m["name"], m["content"][:2]) for m in turn.observation] == [("echo", "a?"), ("?", "Er")]  # type: ignore[index]


def test_schemas_are_made_once(environment: ToolEnvironment) -> None:
    assert environment.tool_schemas is environment.tool_schemas


def test_an_empty_result_stays_empty(environment: ToolEnvironment) -> None:
    assert told(environment, call("echo", text="")) == [""]


def test_what_a_tool_prints_does_not_disturb(environment: ToolEnvironment) -> None:
    assert told(environment, call("misbehave", how="print")) == ["printed"]


def test_schemas_come_from_type_hints_and_docstrings(environment: ToolEnvironment) -> None:
    first = environment.tool_schemas[0]["function"]
    assert first["name"] == "multiply" and first["description"] == "Multiplies two numbers."
    assert first["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}
    with pytest.raises(ValueError, match="'undocumented' has no schema"):
        _ = ToolEnvironment(tools=[user_tools.undocumented]).tool_schemas


@pytest.mark.parametrize("tool", ["user_tools:multiply", "user_tools.multiply", f"{user_tools.__file__}:multiply"])
def test_a_tool_may_be_named(tool: str) -> None:
    environment = ToolEnvironment(tools=[tool], workers=1)
    try:
        assert told(environment, call("multiply", a=3, b=4)) == ["12"]
    finally:
        environment.shutdown()


CALC = {"calc": calc}


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("<calc>12*7</calc>", "<result>84</result>"),
        ("I say <calc>1/4</calc> and <calc>2+3</calc>", "<result>0.25</result>\n<result>5</result>"),
        ("<calc>12*7", "<error>the call is not closed by </calc></error>"),
        ("<calc>12*</calc>", "<error>ValueError: not an arithmetic expression</error>"),
        ("<calc>1/0</calc>", "<error>ZeroDivisionError: Fraction(1, 0)</error>"),
        ("<calc>__import__('os')</calc>", "<error>ValueError: not an arithmetic expression</error>"),
    ],
)
def test_a_calculator_in_tags(action: str, observation: str) -> None:
    environment = ToolEnvironment(tools=[calc], parser=TagCalls(), workers=1)
    try:
        turn = play(environment, [action])[-1]
        assert turn.observation == observation and not turn.terminated
        assert play(environment, ["84"])[-1].terminated
    finally:
        environment.shutdown()


def test_the_wording_of_results_is_an_argument() -> None:
    parser = TagCalls(result="= {text}", error="! {text}")
    assert parser.observation([Result("calc", "5"), Result("calc", "{text}", failed=True)]) == "= 5\n! {text}"
    assert HermesCalls().observation([Result("f", "no", failed=True)]) == [
        {"role": "tool", "name": "f", "content": "Error: no"}
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ToolEnvironment(tools=[]), "one function or more"),
        (lambda: ToolEnvironment(tools=[lambda x: x]), "top of a module"),
        (lambda: ToolEnvironment(tools=["user_tools:absent"]), "no such name"),
        (lambda: ToolEnvironment(tools=[user_tools.multiply], parser=TagCalls()), "'multiply' needs 2"),
        (lambda: ToolEnvironment(tools=[calc, calc]), "calc"),
        (lambda: ToolEnvironment(tools=[calc], time_limit_s=0), "time_limit_s"),
        (lambda: ToolEnvironment(tools=[calc], action_limit_s=float("inf")), "action_limit_s"),
        (lambda: ToolEnvironment(tools=[calc], most_calls=0), "most_calls"),
    ],
)
def test_tools_that_cannot_work_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


SCHEMA = {"type": "function", "function": {"name": "calc", "parameters": {
    "type": "object", "properties": {"digits": {}, "expression": {}}, "required": ["expression"]}}}  # fmt: skip


def test_tools_may_be_schemas_alone() -> None:
    (call,) = TagCalls().calls("so <calc>12*7</calc>.", {"calc": SCHEMA})
    assert (call.name, call.arguments, call.span) == ("calc", {"expression": "12*7"}, (3, 20))
    TagCalls().check({"calc": SCHEMA})
    with pytest.raises(ValueError, match="'look' needs 0"):
        TagCalls().check({"look": {"type": "function", "function": {"name": "look"}}})


@pytest.mark.parametrize("parser", [HermesCalls(), TagCalls()], ids=lambda parser: type(parser).__name__)
def test_a_written_call_is_read_back(parser: Any) -> None:
    made = Call("calc", {"expression": "é<2>"})
    text = parser.written(made)
    (call,) = parser.calls(f"so {text} and", {"calc": SCHEMA})
    assert call[:3] == made[:3] and f"so {text} and"[slice(*call.span)] == text
    ((opening, closing),) = parser.tags({"calc": SCHEMA})
    assert text.startswith(opening) and text.endswith(closing)
