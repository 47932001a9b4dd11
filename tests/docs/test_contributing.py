"""The examples of CONTRIBUTING.md do what they say."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def _example(first_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that a code block defines, imported under the name that its first line gives."""
    (code,) = re.findall(rf"^```python\n(# {re.escape(first_line)}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    file = tmp_path / first_line
    file.parent.mkdir()
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    return importlib.import_module(first_line.removesuffix(".py").replace("/", "."))


def test_the_reward_is_built_from_its_yaml_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_pl.config.objects import build
    from grpo_pl.rewards.base import Reward

    _example("my_package/rewards.py", tmp_path, monkeypatch)
    (block,) = re.findall(r"^```yaml\n(.*?Brevity.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    reward = build(Reward, yaml.safe_load(block)["model"]["rewards"][0], "reward")
    assert [score.value for score in reward(["", "a" * 80], ["", ""], {})] == [1.0, 0.5]
    assert reward.weight == 0.2


@pytest.mark.slow
def test_score_finds_a_reward_that_lies_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _example("my_package/rewards.py", tmp_path, monkeypatch)
    (tmp_path / "rows.jsonl").write_text('{"completion": "12345678", "answer": "1"}\n')
    reward = {"class_path": "my_package.rewards.Brevity", "init_args": {"scale": 8, "correctness": True}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"rewards": [reward]}))
    command = [str(Path(sys.executable).with_name("grpo-pl")), "score", "rows.jsonl", "--config", "my.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "rows.scores.jsonl").read_text())["scores"]["brevity"]["value"] == 0.5


def test_the_source_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squares = _example("my_package/sources.py", tmp_path, monkeypatch).Squares(limit=100)
    step = squares.prompts(3, count=20)
    assert step == squares.prompts(3, count=20) and step != squares.prompts(4, count=20)
    assert len({prompt.id for prompt in step}) == 20
    assert not {prompt.id for prompt in step} & {prompt.id for prompt in squares.validation()}
    assert squares.validation(1)[0].question == "0*0="


def test_every_verb_has_its_file_and_its_function() -> None:
    from grpo_pl.cli.commands import VERBS

    for verb in VERBS:
        assert callable(getattr(importlib.import_module(f"grpo_pl.cli.commands.{verb}"), verb))
