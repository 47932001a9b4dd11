"""The examples of CONTRIBUTING.md do what they say."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, as_module, blocks

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def _example(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that a code block defines, imported under the name that its first line gives."""
    (code,) = blocks(PAGE, "python", f"# {file}")
    name = file.removesuffix(".py").replace("/", ".")
    as_module(name, code, tmp_path, monkeypatch)
    return importlib.import_module(name)


def test_the_reward_is_built_from_its_yaml_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_pl.config.objects import build
    from grpo_pl.rewards.base import Reward

    _example("my_package/rewards.py", tmp_path, monkeypatch)
    (block,) = [block for block in blocks(PAGE, "yaml") if "Brevity" in block]
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
    from grpo_pl.cli.commands import VERBS, module_of

    for verb in VERBS:
        assert callable(getattr(importlib.import_module(module_of(verb)), verb))
