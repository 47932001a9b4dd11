"""What environments return is read with care: every other type is one clear line."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from user_environments import Countdown, Wayward

from grpo_pl.config.objects import build
from grpo_pl.environment import (
    Environment,
    EnvironmentMistake,
    Transition,
    attempted,
    episode_value,
    play,
    read_reset,
    read_step,
    state_name,
)
from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment


def test_a_step_is_read_as_gymnasium_has_it() -> None:
    found = read_step(("seen", 1, True, False, {"note": 3, "invalid_action": True}))
    assert found == Transition(
        observation="seen", reward=1.0, terminated=True, state="seen", invalid_action=True, info={"note": 3}
    )
    assert found.done and not read_reset(("", {})).done


def test_messages_are_an_observation() -> None:
    messages = [{"role": "tool", "content": "84", "name": "calc"}, {"role": "user", "content": "and now?"}]
    assert read_step((messages, 0.0, False, False, {})).state == "84\nand now?"


OTHERS = {
    "a finite number is needed": [
        ("", reward, False, False, {}) for reward in (math.nan, math.inf, None, "1", b"1", [1.0], 10**400, -1e300)
    ],
    r"returned the observation .* a text is needed": [
        (seen, 0.0, False, False, {})
        for seen in (None, 3, b"text", ["text"], [{"role": "user"}], [{"role": 1, "content": ""}])
    ],
    "stands for bytes that are no text": [
        (seen, 0.0, False, False, {}) for seen in ("half \udc80", "\ud83d", [{"role": "user", "content": "\udc80"}])
    ],
    "step must return": [None, "text", ("", 0.0, False, {}), ["", 0.0, False, False, {}]],
}


@pytest.mark.parametrize(("says", "returned"), [(says, each) for says, those in OTHERS.items() for each in those])
def test_what_is_no_step_is_refused(says: str, returned: Any) -> None:
    with pytest.raises(EnvironmentMistake, match=says):
        read_step(returned)


@pytest.mark.parametrize(
    ("says", "returned"), [("reset returned the observation", (3, {})), ("reset must return", ("", 0.0, False))]
)
def test_what_is_no_reset_is_refused(says: str, returned: Any) -> None:
    with pytest.raises(EnvironmentMistake, match=says):
        read_reset(returned)


@pytest.mark.parametrize(
    ("one", "same"), [(1, 1.0), (True, 1), ((1, "a"), (1.0, "a")), (frozenset("ab"), frozenset("ba")), ("x", "x")]
)
def test_equal_states_have_one_name(one: Any, same: Any) -> None:
    assert state_name(one) == state_name(same)


def test_different_states_have_different_names() -> None:
    states = [
        1,
        1.5,
        (1,),
        (1, 2),
        ("1", 2),
        ("1, 2",),
        None,
        "a",
        ("a",),
        (("a",), "b"),
        ("a", ("b",)),
        frozenset("a"),
    ]
    assert len(set(map(state_name, states))) == len(states)


def test_a_number_of_numpy_is_a_state_and_an_array_is_told_how_to_become_one() -> None:
    numpy = pytest.importorskip("numpy")
    assert state_name((numpy.int64(3), numpy.float32(0.5))) == state_name((3, 0.5))
    with pytest.raises(EnvironmentMistake, match="tolist"):
        state_name(numpy.zeros(2))


def test_an_episode_is_worth_its_rewards_unless_its_environment_failed() -> None:
    turns = play(Countdown(start=3), ["-1", "-2"], row={})
    assert [turn.observation for turn in turns] == ["3 (seed 0)", "2", "0"]
    assert episode_value(turns) == 0.3  # in binary 0.1 + 0.2 is not
    failed = attempted(Wayward().step, {"action": "raise"}, where="step", blame="environment")
    assert failed.status == "raised" and "KeyError: 'missing'" in failed.detail
    assert episode_value([*turns, failed]) is None
    fault = attempted(Wayward().step, {"action": "fault"}, where="step", blame="environment")
    assert (fault.status, fault.blame) == ("policy", "policy") and episode_value([*turns, fault]) == 0.3


def test_playing_ends_with_the_episode_and_leaves_the_pattern_alone() -> None:
    pattern = Countdown(start=2)
    assert len(play(pattern, ["x", "-2", "-2", "-2"])) == 3 and pattern.left == 0


def test_a_player_sees_all_that_has_happened_and_may_give_up() -> None:
    seen: list[int] = []

    def player(turns: Sequence[Transition]) -> str | None:
        seen.append(len(turns))
        return "1" if len(turns) < 3 else None

    assert len(play(Countdown(), player, row={"start": 9})) == 3
    assert seen == [1, 2, 3]


def test_settings_are_told_as_a_configuration_holds_them() -> None:
    environment = ToolEnvironment(tools=[calc], parser=TagCalls(result="{text}"), time_limit_s=2)
    spec = environment.spec()
    assert spec["class_path"] == "grpo_pl.extras.agents.tools.ToolEnvironment"
    assert spec["init_args"]["tools"] == ["grpo_pl.extras.agents.calculator:calc"]
    assert spec["init_args"]["parser"]["class_path"] == "grpo_pl.extras.agents.tool_calls.TagCalls"
    assert build(Environment, spec, "environment") == replace(environment, tools=spec["init_args"]["tools"])
    with pytest.raises(ValueError, match="cannot be found by name in another process"):
        replace(environment, tools=[lambda x: x]).spec()


def test_a_failed_reset_is_never_the_policys_fault() -> None:
    failed = attempted(lambda: None, {}, where="reset", blame="policy")
    assert (failed.status, failed.blame) == ("malformed", "environment")
