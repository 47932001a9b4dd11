"""Tasks of inspect-ai: what their scorers pay, and trainings on them."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.agents import EnvironmentPool
from grpo_pl.extras.agents.inspect_tasks import InspectEnvironment
from grpo_pl.extras.agents.tool_calls import TagCalls
from tests.extras.agents.turns import reset, step

SUMS = f"{Path(__file__).parents[2] / 'plugins' / 'inspect_sums.py'}:sums"
KIND = "grpo_pl.extras.agents.inspect_tasks.InspectEnvironment"
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="inspect-ai is not installed"),
]


def test_the_value_of_the_scorer_is_the_reward() -> None:
    with EnvironmentPool(InspectEnvironment(task=SUMS, task_args={"scorers": "both"}, scorer="includes")) as pool:
        tasks = pool.tasks()
        assert (len(tasks), tasks[1]) == (81, {"question": "1+2=", "answer": "3", "sample": 2})
        start = reset(pool, 0, 1, **tasks[1])[0]
        assert start.observation == [{"role": "user", "content": "1+2="}], start.detail
        ends = step(pool, {0: "it is 3", 1: "it is 4"})
    assert [(ends[n].status, ends[n].reward) for n in range(2)] == [("ok", 1.0), ("ok", 0.0)], ends[0].detail


def test_tools_are_called_and_a_limit_ends_a_session_that_counts() -> None:
    calculator = InspectEnvironment(task=SUMS, task_args={"tools": True}, parser=TagCalls())
    with EnvironmentPool(calculator) as pool:
        starts = reset(pool, 0, 1, question="7+6=", sample=60)
        assert [tool["function"]["name"] for tool in starts[0].info["tools"]] == ["calc"]
        assert step(pool, dict.fromkeys(range(2), "<calc>7+6</calc>"))[0].observation == "<result>13</result>"
        pool.step(0, "is 13")
        pool.finish(1)
        ends = pool.collect_all()
    assert [(ends[n].status, ends[n].reward) for n in range(2)] == [("ok", 0.4), ("ok", 0.0)], ends[1].detail


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"task_args": {"scorers": "both"}}, "scorer=? is none of includes, digits"),
        ({"task_args": {"scorers": "undecided"}}, "undecided gives a dict"),
        ({"task_args": {"scorers": "praises"}}, "praises gives"),
    ],
)
def test_a_scorer_that_gives_no_number_leaves_the_session_out(settings: dict[str, Any], told: str) -> None:
    with EnvironmentPool(InspectEnvironment(task=SUMS, **settings)) as pool:
        reset(pool, 0, question="1+1=", sample=1)
        end = step(pool, {0: "2"})[0]
    assert (end.status, end.blame) == ("no_reward", "environment") and told in end.detail


def test_a_policy_that_would_grade_itself_is_paid_nothing() -> None:
    with EnvironmentPool(InspectEnvironment(task=SUMS, task_args={"scorers": "asks_a_grader"})) as pool:
        reset(pool, 0, question="1+1=", sample=1)
        for action in ("3", "C"):
            end = step(pool, {0: action})[0]
    assert (end.status, end.blame) == ("no_reward", "environment") and "a scorer asks the policy itself" in end.detail


def test_an_answer_over_which_the_solver_raises_counts_0_though_the_task_goes_on() -> None:
    with EnvironmentPool(InspectEnvironment(task=SUMS.replace(":sums", ":numbers"))) as pool:
        reset(pool, 0, question="1+1=", sample=1)
        end = step(pool, {0: "two"})[0]
    assert (end.status, end.blame) == ("raised", "policy") and "invalid literal for int()" in end.detail


def test_a_sample_that_is_another_one_here_is_no_fault_of_the_policy() -> None:
    with EnvironmentPool(InspectEnvironment(task=SUMS.replace(":sums", ":shuffled"))) as pool:
        rows = pool.tasks()
        pool.reset(0, seed=0, row={**rows[0], "sample": 2})
        pool.reset(1, seed=0, row=rows[0])
        starts = pool.collect_all()
    assert starts[0].blame == "environment" and "give its dataset a seed or ids" in starts[0].detail
    assert starts[1].status == "ok", starts[1].detail


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"task": "nowhere.py:sums"}, "there is no file"),
        ({"task_args": {"mots": 3}}, "raised TypeError: .*mots"),
        ({"task": f"{SUMS}s"}, "sumss"),
        ({"task": SUMS.replace(":sums", ":generate")}, "not a Task"),
    ],
)
def test_what_is_no_task_is_told_in_one_line(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        InspectEnvironment(**{"task": SUMS, **settings}).prepare()


def test_a_task_trains_for_five_rollouts(five_rollouts: Callable[..., list[dict[str, Any]]]) -> None:
    sessions = five_rollouts("inspect", KIND, task=SUMS)
    assert len(sessions) == 5 * 8
    assert {session["episode"]["status"] for session in sessions} == {"ok"}
    paid = [session["episode"]["return"] for session in sessions]
    assert sum(paid[-16:]) > sum(paid[:16])  # more digits
