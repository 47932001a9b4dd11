"""Agents in frameworks of others (64 sessions each) and in Node (8), with the rows of our own tool loop.

The frameworks are in no extra: `pip install pydantic-ai-slim openai-agents inspect-ai`, then `pytest -m agents`.
"""

import importlib.util
import shutil
from pathlib import Path

import pytest
from framework_agents import FRAMEWORKS

from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.tokenizer import character_tokenizer
from tests.conftest import ScriptedEngine
from tests.extras.agents.test_agent_episodes import SHAPE, play
from tests.rollout.drawn import assert_same

PLUGINS = Path(__file__).parents[2] / "plugins"
SESSIONS = 64


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.agents) for name in FRAMEWORKS), "node"])
def test_many_sessions_are_the_rows_of_our_own_tool_loop(name: str) -> None:
    if name == "node" and shutil.which("node") is None:
        pytest.skip("there is no node")
    if name != "node" and importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed")
    tokenizer = character_tokenizer()
    model = load_model(PolicyConfig(from_scratch=SHAPE), tokenizer)
    sessions = 8 if name == "node" else SESSIONS  # in the default tests
    turns = ["<calc>1+2</calc>", "so <calc>3*4</calc>", "it is 12"]
    engine = ScriptedEngine(tokenizer, {0: [turns] * sessions})
    ours = ToolEnvironment(tools=[f"{PLUGINS / 'agent_tools.py'}:calc"], parser=TagCalls())
    if name == "node":
        theirs = AgentEnvironment(command=["node", str(PLUGINS / "agent.js")], parser=TagCalls())
    else:
        theirs = AgentEnvironment(agent=f"{PLUGINS / 'framework_agents.py'}:{name}", parser=TagCalls())
    (expected, _), (found, episodes) = (
        play(one, tokenizer, model, engine, group_size=sessions) for one in (ours, theirs)
    )
    assert {(episode.status, episode.detail) for episode in episodes} == {("ok", "")}
    assert_same(found, expected, atol=0.0)
