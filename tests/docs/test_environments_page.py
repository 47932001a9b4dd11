"""The environments of docs/environments.md play as the page says, and those of docs/agents.md can be built."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from grpo_pl.config.objects import build, read
from grpo_pl.data.sources import PromptSource
from grpo_pl.environment import Environment, play
from grpo_pl.extras.agents import EnvironmentPool
from grpo_pl.rewards import Reward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.types import SamplingParams
from tests.docs.pages import as_module, blocks, page

PAGE = page("environments")


def _block(language: str, with_: str) -> str:
    """The first block of code on the page with this text."""
    return next(block for block in blocks(PAGE, language) if with_ in block)


def test_the_tool_on_the_page_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _block("python", "# my_tools.py")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    settings = yaml.safe_load(_block("yaml", "my_tools.py"))["model"]["environment"]
    environment = build(Environment, settings, "environment")
    (schema,) = environment.tool_schemas
    assert set(schema["function"]["parameters"]["properties"]) == {"start", "end"}
    call = json.dumps({"name": "minutes", "arguments": {"start": "09:30", "end": "17:05"}})
    try:
        turns = play(environment, [f"<tool_call>{call}</tool_call>", "455 minutes"])
    finally:
        environment.shutdown()
    assert turns[1].observation == [{"role": "tool", "name": "minutes", "content": "455"}]
    assert turns[2].terminated


def test_the_run_on_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_module("my_package.guessing", _block("python", "# my_package/guessing.py"), tmp_path, monkeypatch)
    file = tmp_path / "run.yaml"
    file.write_text(_block("yaml", "Guessing"))
    config = read([file])
    assert config.build("model.environment", Environment).most == 15  # type: ignore[attr-defined]
    assert config.build("model.episodes", EpisodeSettings).max_turns == 5
    assert config.build("model.sampling", SamplingParams).max_completion_length == 8
    assert len(config.build("model.rewards", list[Reward])) == 1


def test_the_environment_on_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _block("python", "# my_package/guessing.py")
    as_module("guessing_of_the_page", code, tmp_path, monkeypatch)
    Guessing = import_module("guessing_of_the_page").Guessing

    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    turns = play(Guessing(), [str(number) for number in range(1, 21)], seed=3)
    assert turns[-1].terminated and turns[-1].reward == 1.0
    assert {turn.observation for turn in turns[1:-1]} == {"Higher."}
    assert play(Guessing(), ["ten"])[-1].invalid_action
    with EnvironmentPool(Guessing()) as pool:
        pool.reset(0, seed=3, row={})
        assert pool.collect_all()[0] == turns[0]


def test_every_class_is_where_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\)", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for name, module in rows:
        assert hasattr(import_module(f"grpo_pl.extras.agents.{module}"), name)


def test_every_environment_on_the_page_of_agents_and_its_source_can_be_built() -> None:
    found = set()
    for block in blocks(page("agents"), "yaml"):
        tree = yaml.safe_load(block.replace("/path/of/the/other/venv/bin/python", sys.executable))
        given = tree["model"]["environment"] if "model" in tree else tree
        found.add(type(build(Environment, given, "environment")).__name__)
        if "data" in tree:
            source = build(PromptSource, tree["data"]["source"], "source")
            assert source.environment.env["agent"]["harness"]["id"] == "null"  # type: ignore[attr-defined]
    assert found == {"AgentEnvironment", "VerifiersEnvironment", "InspectEnvironment"}
