"""The environment on the page plays as the page says, and its classes are where it says."""

import json
import re
from pathlib import Path

import pytest
import yaml

from grpo_pl.config.objects import build, read
from grpo_pl.environments import Environment, EnvironmentPool, play
from grpo_pl.rewards import Reward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.types import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def _block(language: str, beginning: str) -> str:
    """The one block of code on the page that begins so."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return str(block)


def test_the_tool_on_the_page_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _block("python", "# my_tools.py")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    settings = next(
        yaml.safe_load(text)["model"]["environment"]
        for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        if "my_tools.py" in text
    )
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
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "guessing.py").write_text(_block("python", "# my_package/guessing.py"))
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(next(text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "Guessing" in text))
    config = read([file])
    assert config.build("model.environment", Environment).most == 15  # type: ignore[attr-defined]
    assert config.build("model.episodes", EpisodeSettings).max_turns == 5
    assert config.build("model.sampling", SamplingParams).max_completion_length == 8
    assert len(config.build("model.rewards", list[Reward])) == 1


def test_the_environment_on_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _block("python", "# my_package/guessing.py")
    (tmp_path / "guessing_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    from guessing_of_the_page import Guessing

    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    turns = play(Guessing(), [str(number) for number in range(1, 21)], seed=3)
    assert turns[-1].terminated and turns[-1].reward == 1.0
    assert {turn.observation for turn in turns[1:-1]} == {"Higher."}
    assert play(Guessing(), ["ten"])[-1].invalid_action
    with EnvironmentPool(Guessing()) as pool:
        pool.reset(0, seed=3, row={})
        assert pool.collect_all()[0] == turns[0]


def test_every_class_is_where_the_page_says() -> None:
    from importlib import import_module

    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\)", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for name, module in rows:
        assert hasattr(import_module(f"grpo_pl.environments.{module}"), name)
