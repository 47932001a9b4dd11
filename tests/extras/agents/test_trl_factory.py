"""Factories written for TRL run unchanged."""

import pytest
import user_tools
from user_tools import call

from grpo_pl.extras.agents import EnvironmentPool, episode_value, play
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.extras.agents.trl_factory import TRLEnvironment
from tests.extras.agents.turns import reset, step


def test_public_methods_are_tools_and_the_reward_comes_at_the_end() -> None:
    environment = TRLEnvironment(factory=user_tools.Counter)
    assert [s["function"]["name"] for s in environment.tool_schemas] == ["increment", "wait"]
    turns = play(environment, [call("increment", step=2) + call("wait"), "done"], row={"start": 3, "answer": "5"})
    assert turns[0].observation == "The counter stands at 3."
    assert [m["content"] for m in turns[1].observation] == ["5", "waited"]  # type: ignore[index]
    assert turns[2].terminated and turns[2].reward == 1.0


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (call("increment", step=-1), "Error: step must not be negative"),
        (call("_hidden"), "Error: there is no tool '_hidden'"),
        (call("reset"), "Error: there is no tool 'reset'"),
        (call("get_reward"), "Error: there is no tool"),
        (call("increment"), "missing a required argument"),
    ],
)
def test_a_call_that_fails_is_answered(action: str, says: str) -> None:
    turn = play(TRLEnvironment(factory="user_tools:Counter"), [action])[-1]
    assert says in turn.observation[0]["content"] and not turn.done  # type: ignore[index,call-overload]


def test_a_limit_of_the_caller_asks_for_the_reward() -> None:
    with EnvironmentPool(TRLEnvironment(factory=user_tools.Counter)) as pool:
        turns = list(reset(pool, 0, start=4, prompt=[{"role": "user", "content": "Count to five."}]).values())
        turns += step(pool, {0: call("increment", step=1)}).values()
        assert not turns[-1].done
        pool.finish(0)
        turns += pool.collect_all().values()
        assert turns[-1].truncated and episode_value(turns) == 1.0
        assert reset(pool, 0)[0].observation == "The counter stands at 0."  # the number is free again


def test_an_object_is_made_once_for_the_schemas() -> None:
    made: list[user_tools.Counter] = []
    environment = TRLEnvironment(factory=lambda: made.append(user_tools.Counter()) or made[-1])  # type: ignore[func-returns-value]
    assert environment.tool_schemas is environment.tool_schemas and len(made) == 1


def test_the_least_that_trl_asks_for_will_do() -> None:
    turns = play(TRLEnvironment(factory=user_tools.Silent), [call("nothing"), "bye"], row={"question": "?"})
    assert turns[0].observation == "" and turns[-1].terminated and episode_value(turns) == 0.0


def test_calls_may_be_in_tags() -> None:
    environment = TRLEnvironment(factory=user_tools.Silent, parser=TagCalls())
    with pytest.raises(ValueError, match="'nothing' needs 0"):
        environment.prepare()


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("user_tools:NoTools", "no tool to use"),
        ("builtins:dict", "no method reset"),
        ("user_tools:None", "no such name"),
    ],
)
def test_what_is_no_environment_is_refused(factory: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EnvironmentPool(TRLEnvironment(factory=factory)).start()
