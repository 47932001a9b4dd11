"""The check of gold answers before training: what is kept of it, and what makes it anew."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from grpo_pl.rewards import ExactReward, PerSource, golds
from grpo_pl.rewards.golds import check_golds

MINE = """
from dataclasses import dataclass

from grpo_pl.rewards import ExactReward


@dataclass(kw_only=True)
class Mine(ExactReward):
    name: str = "mine"

    def gold_faults(self, golds):
        return ["refused" if gold == "bad" else "" for gold in golds]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A reward in a file of the user's."""
    (tmp_path / "rewards_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("rewards_of_mine")
    del sys.modules["rewards_of_mine"]


def _rows(module: ModuleType, cache: Path, *, inside: bool = False) -> list[int]:
    reward = module.Mine()
    if inside:
        reward = PerSource(rewards={"a": reward})
    check_golds(reward, ["good", "bad"], cache_folder=cache)
    return [bad.row for bad in check_golds(module.Mine(), ["good", "bad"], cache_folder=cache)]


def test_an_edited_reward_checks_its_golds_again(mine: ModuleType, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert _rows(mine, cache) == [1] == _rows(mine, cache) and len(list(cache.iterdir())) == 1
    Path(str(mine.__file__)).write_text(MINE.replace('"bad"', '"good"'))
    assert _rows(importlib.reload(mine), cache) == [0]
    _rows(mine, cache, inside=True)
    before = set(cache.iterdir())
    Path(str(mine.__file__)).write_text(MINE + "\n# edited\n")
    _rows(mine, cache, inside=True)
    assert len(set(cache.iterdir()) - before) == 2  # its own, and that of the reward which holds it


def test_the_judge_names_the_check_and_not_the_version_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golds, "version", lambda package: {"sympy": "0"}.get(package, "1"))
    check_golds(ExactReward(), ["a"], cache_folder=tmp_path)
    monkeypatch.setattr(golds, "version", lambda package: {"sympy": "0", "grpo_pl": "2"}.get(package, "1"))
    check_golds(ExactReward(), ["a"], cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    for package in ("sympy", "math-verify", "latex2sympy2_extended"):
        monkeypatch.setattr(golds, "version", lambda name, other=package: "other" if name == other else "1")
        check_golds(ExactReward(), ["a"], cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_reward_without_a_file_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    typed = type("Typed", (ExactReward,), {"__module__": "notebook"})
    assert [bad.row for bad in check_golds(typed(), ["a", " "], cache_folder=tmp_path)] == [1]
    assert list(tmp_path.iterdir()) == []
