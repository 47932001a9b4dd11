"""Agents over HTTP: what they ask and say, what they may do wrong, and what the policy's text cannot reach."""

import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_pl.extras.agents import EnvironmentPool, PoolLimits, Transition, episode_value
from grpo_pl.extras.agents.agent_session import AgentSession
from grpo_pl.extras.agents.in_processes import _is_of_this_interpreter
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import TagCalls
from tests.extras.agents.turns import reset, step
from tests.process_list import started_processes

AGENTS = str(Path(__file__).parents[2] / "plugins" / "user_agents.py")
LIMITS = PoolLimits(step_timeout_s=3.0)


def agent(name: str, **settings: Any) -> AgentEnvironment:
    return AgentEnvironment(agent=f"{AGENTS}:{name}", **settings)


def play(pool: EnvironmentPool, rows: list[dict[str, Any]], *, turns: int = 4) -> list[list[Transition]]:
    """Episodes of all rows, in which the policy answers ``turn 0``, ``turn 1`` …, and after ``turns`` no more."""
    for number, row in enumerate(rows):
        pool.reset(number, seed=3, row=row)
    seen = {number: [start] for number, start in pool.collect_all().items()}
    while live := [number for number, those in seen.items() if not those[-1].done]:
        for number in live:
            count = len(seen[number]) - 1
            if count < turns:
                pool.step(number, f"turn {count}", drawn={"finish_reason": "stop"})
            else:
                pool.finish(number)
        for number, transition in pool.collect_all().items():
            over = len(seen[number]) - 1 == turns
            seen[number].append(transition)
            assert transition.done or not over
    return [seen[number] for number in range(len(rows))]


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Transition]]]:
    before = set(started_processes())
    folder = str(tmp_path_factory.mktemp("run"))
    with EnvironmentPool(agent("wayward", rewarded_by="agent"), LIMITS) as pool, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        played = play(pool, [{"deed": deed, "folder": folder} for deed in FATES])
    assert set(started_processes()) <= before
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000.25"]]
    yield dict(zip(FATES, played, strict=True))


FATES: dict[str, tuple[str, float | None]] = {
    "well": ("ok", 1.0),
    "raise at once": ("raised", None),  # before the policy has said anything
    "no call": ("no_reward", None),
    "refused": ("no_reward", None),
    "raise": ("raised", 0.0),
    "exit": ("raised", 0.0),
    "leave": ("raised", 0.0),
    "die": ("killed", 0.0),
    "hang": ("timeout", 0.0),
    "nan": ("no_reward", None),
    "pays, then raises": ("ok", 0.5),
    "unsupported": ("raised", None),
    "image": ("raised", None),
    "image in the message": ("raised", None),
    "no reward": ("no_reward", None),
    "child": ("ok", 1.0),
    "two rewards": ("ok", 0.25),
    "retry": ("ok", 1.0),
    "edited": ("ok", 1.0),
    "compacted": ("ok", 1.0),
    "equal at once": ("ok", 1.0),
    "different at once": ("ok", 1.0),
    "ten megabytes": ("too_long", 0.0),
    "a hundred calls and more": ("ok", 0.5),
    "forge": ("ok", 0.0),
    "trespass": ("ok", 1.0),
}


@pytest.mark.parametrize("deed", FATES)
def test_what_an_agent_does_costs_its_session_alone(deed: str, fates: dict[str, list[Transition]]) -> None:
    turns = fates[deed]
    assert (turns[-1].status, episode_value(turns)) == FATES[deed], turns[-1].detail
    if turns[-1].status == "raised":
        assert "agent" in turns[-1].detail


def test_an_exception_is_told_with_its_place(fates: dict[str, list[Transition]]) -> None:
    assert "KeyError: 'malformed' (user_agents.py:" in fates["raise"][-1].detail


def test_flaky_agents_and_rewritten_sessions_may_be_left_out() -> None:
    flaky = agent("wayward", rewarded_by="agent", on_agent_error="leave_out", on_rewrite="leave_out")
    deeds = ("raise", "hang", "edited")
    with EnvironmentPool(flaky, PoolLimits(step_timeout_s=1.0)) as pool:
        played = play(pool, [{"deed": deed} for deed in deeds])
    assert [(turns[-1].status, episode_value(turns)) for turns in played] == [
        ("raised", None),
        ("timeout", None),
        ("rewritten", None),
    ]


def test_a_rewritten_session_may_count_0() -> None:
    deeds = ("edited", "compacted", "equal at once", "different at once", "well")
    with EnvironmentPool(agent("wayward", rewarded_by="agent", on_rewrite="zero"), LIMITS) as pool:
        played = play(pool, [{"deed": deed} for deed in deeds])
    assert [(turns[-1].status, episode_value(turns)) for turns in played] == [("rewritten", 0.0)] * 4 + [("ok", 1.0)]
    assert "message 0 of a call is not that of the call before" in played[0][-1].detail


def test_a_call_continues_the_longest_conversation_that_it_begins_with() -> None:
    with EnvironmentPool(agent("branching", rewarded_by="agent"), LIMITS) as pool:
        (turns,) = play(pool, [{"question": "?"}], turns=8)
    assert turns[-1].reward == 7.0, turns[-1].detail
    conversations = [turn.info.get("segment", 0) for turn in turns[:-1]]
    assert (conversations[0], conversations[4:]) == (0, [0, 3, 4])
    assert sorted(conversations[1:4]) in ([1, 1, 2], [1, 2, 2])  # whichever of the two began first
    assert turns[4].observation == "and then?"
    assert turns[6].observation == [
        {"role": "user", "content": "another"},
        {"role": "assistant", "content": "turn 0"},
        {"role": "user", "content": "so?"},
    ]


def test_the_run_judges_an_agent_that_returns_text_and_as_a_reward_text_is_refused() -> None:
    for rewarded_by, expected in (("rewards", ("ok", 0.0)), ("agent", ("no_reward", None))):
        with EnvironmentPool(agent("returns_text", rewarded_by=rewarded_by), LIMITS) as pool:
            (turns,) = play(pool, [{}])
        assert (turns[-1].status, episode_value(turns)) == expected, turns[-1].detail
    assert "a finite number, got \"'turn 0'\"" in turns[-1].detail


def test_what_an_agent_runs_cannot_read_the_processes_of_sessions() -> None:
    inspecting = Path(AGENTS).with_name("inspecting_agent.py")
    with EnvironmentPool(AgentEnvironment(agent=f"{inspecting}:run"), LIMITS) as pool:
        played = play(pool, [{"wait": False}, {"wait": True}])
    assert [turns[-1].status for turns in played] == ["ok", "ok"], [turns[-1].detail for turns in played]


def test_named_variables_of_the_training_are_passed_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SEARCH_KEY", "OTHER_KEY"):
        monkeypatch.setenv(name, "0.25")
    (tmp_path / "shown.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(AGENTS).parent)!r})\nfrom user_agents import ask, user\n"
        "def run(task, base_url, api_key):\n"
        "    ask(base_url, api_key, [user('?')])\n"
        "    return float(os.environ['SEARCH_KEY']) + ('OTHER_KEY' in os.environ)\n"
    )
    shown = {"agent": f"{tmp_path / 'shown.py'}:run", "rewarded_by": "agent"}
    with EnvironmentPool(AgentEnvironment(**shown, passed=["SEARCH_KEY"]), LIMITS) as pool:
        (turns,) = play(pool, [{}])
    assert episode_value(turns) == 0.25, turns[-1].detail
    with (
        pytest.raises(ValueError, match="has no variable NO_SUCH_KEY"),
        EnvironmentPool(AgentEnvironment(**shown, passed=["NO_SUCH_KEY"]), LIMITS) as pool,
    ):
        pool.start()


def test_an_interpreter_that_cannot_run_is_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_bytes(b"\0\1")
    broken.chmod(0o755)
    with (
        pytest.raises(ValueError, match="cannot be started with"),
        EnvironmentPool(agent("chat", python=str(broken)), LIMITS) as pool,
    ):
        pool.start()


def test_another_interpreter_gets_the_folders_of_the_project_and_not_the_libraries_of_this_one() -> None:
    folders = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        f"{sys.prefix}/project",
        str(Path(AGENTS).parent),
    ]
    assert [_is_of_this_interpreter(Path(folder)) for folder in folders] == [True, True, False, False]


def test_tools_are_called_in_the_policys_own_form_and_by_default_the_agent_has_no_say_in_its_reward() -> None:
    with EnvironmentPool(agent("tool_loop", parser=TagCalls(), python=sys.executable)) as pool:
        start = reset(pool, 0, question="7*6=")[0]
        assert start.info["tools"][0]["function"]["name"] == "calc"
        assert "<calc>expression</calc>" in start.info["told_tools"]
        assert step(pool, {0: "<calc>7*6</calc>"})[0].observation == "<result>got 7*6</result>"
        end = step(pool, {0: "<calc>7*6"})[0]  # not closed: a text, which ends the loop
        assert end.terminated and end.invalid_action and (end.status, end.reward) == ("ok", 0.0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "give either agent"),
        ({"agent": "a.py:run", "command": ["node"]}, "give either agent"),
        ({"command": "node agent.js"}, "must be a list"),
        ({"agent": "a.py:run", "python": "/no/bin/python"}, "there is no interpreter"),
        ({"agent": "a.py:run", "python": "/"}, "there is no interpreter"),
        ({"command": ["node"], "python": sys.executable}, "put .* first in command"),
        ({"agent": "a.py:run", "isolation": "thread"}, "isolation must be process"),
        ({"agent": "a.py:run", "rewarded_by": "agents"}, "rewarded_by must be rewards or agent, got 'agents'"),
        ({"agent": "a.py:run", "on_agent_error": "drop"}, "on_agent_error must be zero or leave_out"),
        ({"agent": "a.py:run", "passed": "KEY"}, "passed must be a list"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AgentEnvironment(**settings)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (AgentEnvironment(agent="nowhere.py:run"), "there is no file nowhere.py"),
        (AgentEnvironment(agent=f"{AGENTS}:user"), r"must take \(task, base_url, api_key\), and takes \['text'\]"),
        (AgentEnvironment(agent=f"{AGENTS}:wayward"), "reward_key"),  # which only an agent that pays gets
        (AgentEnvironment(command=["no-such-program-here"]), "there is no program 'no-such-program-here'"),
    ],
)
def test_an_agent_that_is_not_there_is_told_before_the_first_session(environment: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        environment.prepare()


def test_a_program_is_told_its_task_and_pays_through_a_descriptor(tmp_path: Path) -> None:
    program = tmp_path / "agent.sh"
    program.write_text(
        "read TASK; SECRET=$(cat <&$GRPO_PL_REWARD_FD)\n"
        'curl -s -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
        '-d \'{"messages": [{"role": "user", "content": "hi"}], "stream": true}\' $OPENAI_BASE_URL/chat/completions '
        "> /dev/null\n"
        'curl -s -H "Authorization: Bearer $SECRET" -d \'{"reward": 0.75}\' $OPENAI_BASE_URL/reward\n'
    )
    with EnvironmentPool(AgentEnvironment(command=["bash", str(program)], rewarded_by="agent")) as pool:
        (turns,) = play(pool, [{"question": "?"}])
    assert (turns[-1].status, episode_value(turns), turns[0].observation) == (
        "ok",
        0.75,
        [{"role": "user", "content": "hi"}],
    ), turns[-1].detail


def test_openais_client_runs_unchanged() -> None:
    """Whole, streamed and asynchronous answers, with tools and usage."""
    clients, ways = str(Path(AGENTS).with_name("openai_clients.py")), ("whole", "streamed", "asynchronous")
    with EnvironmentPool(AgentEnvironment(agent=f"{clients}:run", rewarded_by="agent")) as pool:
        for number, way in enumerate(ways):
            pool.reset(number, seed=0, row={"question": "2*3=", "way": way})
        with pytest.warns(UserWarning, match="sets temperature, which has no effect"):
            pool.collect_all()
        call = '<tool_call>{"name": "calc", "arguments": {"expression": "2*3"}}</tool_call>'
        seen = step(pool, dict.fromkeys(range(3), call))
        assert [seen[n].observation for n in range(3)] == 3 * [[{"role": "tool", "name": "calc", "content": "6"}]]
        sixes = dict.fromkeys(range(3), "6")
        ends = step(pool, sixes, finish_reason="stop", prompt_tokens=9, completion_tokens=2)
        assert [(ends[n].status, ends[n].reward, ends[n].detail) for n in range(3)] == 3 * [("ok", 11.0, "")]


def test_ids_of_calls_repeat_and_the_end_answers_every_call_that_waits() -> None:
    session, body = AgentSession(TagCalls(), takes_reward=True), {"messages": [{"role": "user", "content": "7*6="}]}
    headers = {"Authorization": f"Bearer {session.key}"}

    def post() -> Any:
        return session.respond("POST", "/v1/chat/completions", headers, json.dumps(body).encode())

    with ThreadPoolExecutor(2) as threads:
        body["tools"] = [{"type": "function", "function": {"name": "calc", "parameters": {"properties": {"e": {}}}}}]
        asked = threads.submit(post)
        call = session.events.get(timeout=5)
        session.observation(call.request)
        session.answer(call, "<calc>7*6</calc>", {})
        (made,) = json.loads(asked.result(5).body)["choices"][0]["message"]["tool_calls"]
        assert made["id"] == "call_1_0"
        equal = [threads.submit(post) for _ in range(2)]
        for _ in equal:
            session.events.get(timeout=5)
        session.end("over")
        assert [one.result(5).status for one in equal] == [400, 400]
    paid = {"Authorization": f"Bearer {session.reward_key}"}
    assert [session.respond("POST", "/v1/reward", paid, b'{"reward": 1}').status for _ in range(2)] == [200, 400]
    session.close()
