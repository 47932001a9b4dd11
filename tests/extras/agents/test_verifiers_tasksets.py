"""Tasksets of verifiers, of single turns and with a tool: what they pay, and trainings on them.

verifiers may need an environment of its own: ``$GRPO_PL_VERIFIERS_PYTHON`` names the interpreter.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.agents import EnvironmentPool, PoolLimits
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.extras.agents.verifiers_tasksets import VerifiersEnvironment
from tests.extras.agents.turns import reset, step

PLUGINS = Path(__file__).parents[2] / "plugins"
PYTHON = os.environ.get("GRPO_PL_VERIFIERS_PYTHON", "")
KIND = "grpo_pl.extras.agents.verifiers_tasksets.VerifiersEnvironment"
PATIENT = PoolLimits(reset_timeout_s=240.0, step_timeout_s=240.0)
HERE = {"runtime": {"type": "subprocess"}}
needs_verifiers = pytest.mark.skipif(
    not PYTHON and importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
)
pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]


def environment(taskset: str, **settings: Any) -> dict[str, Any]:
    env = {"taskset": {"id": taskset}, "agent": HERE}
    return {"env": env, "python": PYTHON, "variables": {"PYTHONPATH": str(PLUGINS)}} | settings


@needs_verifiers
def test_the_weighted_rewards_of_the_task_are_the_reward() -> None:
    with EnvironmentPool(VerifiersEnvironment(**environment("vf-sums", select={"skip": 1, "limit": 3}))) as pool:
        tasks = pool.tasks()
        assert [(task["question"], task["answer"]) for task in tasks] == [("1+2=", "3"), ("1+3=", "4"), ("1+4=", "5")]
        for number, task in enumerate(tasks):
            pool.reset(number, seed=0, row=task)
        starts = pool.collect_all()
        assert starts[0].observation == [{"role": "user", "content": "1+2="}], starts[0].detail
        ends = step(pool, dict(enumerate(("3", "9 or so.", "five"))))
    assert [(ends[n].status, ends[n].reward) for n in range(3)] == [("ok", 1.25), ("ok", 0.25 / 8), ("ok", 0.0)]


@needs_verifiers
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_the_null_harness_of_verifiers_plays_as_it_is() -> None:
    env = {"taskset": {"id": "vf-sums"}, "agent": {"harness": {"id": "null"}, **HERE}}
    passed = [name for name in ("SSL_CERT_FILE",) if name in os.environ]  # for uv
    with EnvironmentPool(VerifiersEnvironment(**environment("", env=env, passed=passed)), PATIENT) as pool:
        start = reset(pool, 0, **pool.tasks()[1])[0]
        assert start.observation == [{"role": "user", "content": "1+2="}], start.detail
        end = step(pool, {0: "3"})[0]
    assert (end.status, end.reward) == ("ok", 1.25), end.detail


@needs_verifiers
def test_an_environment_of_several_turns_is_played_by_its_own_rules() -> None:
    env = {"taskset": {"id": "vf-guess"}, "player": HERE}
    with EnvironmentPool(VerifiersEnvironment(**environment("", env=env, select={"limit": 4}))) as pool:
        task = pool.tasks()[3]
        assert task["answer"] == "5"
        reset(pool, 0, **task)
        seen = [step(pool, {0: action})[0] for action in ("2", "7", "5")]
    assert [turn.observation for turn in seen[:2]] == ["+", "-"], seen[0].detail
    assert (seen[2].status, seen[2].reward) == ("ok", 1.0), seen[2].detail


@needs_verifiers
def test_a_tool_that_verifiers_serves_is_called_and_a_limit_ends_a_session_that_counts() -> None:
    calculator = VerifiersEnvironment(**environment("vf-calculator"), parser=TagCalls())
    with EnvironmentPool(calculator, PATIENT) as pool:
        task = pool.tasks()[0]
        for number in range(2):
            pool.reset(number, seed=0, row=task)
        starts = pool.collect_all()
        assert [tool["function"]["name"] for tool in starts[0].info["tools"]] == ["calc"], starts[0].detail
        told = step(pool, dict.fromkeys(range(2), "<calc>10+10</calc>"))
        assert [told[number].observation for number in range(2)] == ["<result>20</result>"] * 2
        pool.step(0, "20")
        pool.finish(1)
        ends = pool.collect_all()
    assert [(ends[n].status, ends[n].reward) for n in range(2)] == [("ok", 1.5), ("ok", 0.5)], ends[1].detail


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env": {"taskset": {"id": "vf-sums", "mots": 3}, "agent": HERE}}, "verifiers refuses env: .*mots"),
        ({"select": {"limits": 3}}, "verifiers refuses select .*limits"),
        ({"env": {"taskset": {"id": "vf-guess"}, "player": HERE}}, "'vf-guess' never ends"),
        ({"env": {"id": "user-sim", "taskset": {"id": "vf-sums"}}}, "the policy plays one seat, and 2 seats"),
        ({"env": {"id": "best-of-n", "taskset": {"id": "vf-sums"}, "agent": HERE}}, "seat several times"),
    ],
)
def test_what_verifiers_refuses_is_told_in_one_line(settings: dict[str, Any], told: str) -> None:
    with (
        pytest.raises(ValueError, match=told) as raised,
        EnvironmentPool(VerifiersEnvironment(**environment("vf-sums", **settings))) as pool,
    ):
        pool.tasks()
    assert "\n" not in str(raised.value)


@needs_verifiers
def test_single_turns_train_for_five_rollouts(five_rollouts: Callable[..., list[dict[str, Any]]]) -> None:
    sessions = five_rollouts("single", KIND, **environment("vf-sums"))
    assert len(sessions) == 5 * 8
    assert {session["episode"]["status"] for session in sessions} == {"ok"}
    paid = [session["episode"]["return"] for session in sessions]
    assert sum(paid[-16:]) > sum(paid[:16])  # more digits


@needs_verifiers
@pytest.mark.slow  # verifiers starts two processes of Python for each session's tool
@pytest.mark.timeout(900)
def test_a_taskset_with_a_tool_trains_for_five_rollouts(five_rollouts: Callable[..., list[dict[str, Any]]]) -> None:
    parser = {"class_path": "grpo_pl.extras.agents.tool_calls.TagCalls"}
    sessions = five_rollouts("tools", KIND, shown=True, group_size=2, **environment("vf-calculator"), parser=parser)
    assert len(sessions) == 5 * 2
    assert {session["episode"]["status"] for session in sessions} == {"ok"}
    called = [s for s in sessions if any("<result>" in turn["observation"] for turn in s["episode"]["turns"])]
    assert called and all(session["episode"]["return"] >= 0.5 for session in called)
