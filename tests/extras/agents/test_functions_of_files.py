"""Functions of a user's file, named by ``file.py:function``, work wherever episodes are played."""

from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.agents import Environment, EnvironmentPool
from grpo_pl.extras.agents.gymnasium_ids import GymnasiumEnvironment
from grpo_pl.extras.agents.trl_factory import TRLEnvironment
from tests.extras.agents.turns import reset

FILE = '''
from pathlib import Path

with open(Path(__file__).with_suffix(".log"), "a") as log:
    log.write("run\\n")

def seen(game, observation):
    return "as the file has it"

class Counter:
    def reset(self, **row):
        return "as the file has it"

    def add(self, step: int) -> int:
        """Adds.

        Args:
            step: How much.
        """
        return step
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def trl(file: Path, **settings: Any) -> Environment:
    return TRLEnvironment(factory=f"{file}:Counter", **settings)


def cards(file: Path, **settings: Any) -> Environment:
    pytest.importorskip("gymnasium")
    return GymnasiumEnvironment(id="Blackjack-v1", observe=f"{file}:seen", **settings)


@pytest.mark.parametrize("make", [trl, cards])
def test_in_a_process_of_its_own(file: Path, make: Any) -> None:
    with EnvironmentPool(make(file)) as pool:
        assert {start.observation for start in reset(pool, *range(3)).values()} == {"as the file has it"}
    assert len(file.with_suffix(".log").read_text().split()) == 2  # here, and where episodes are forked from


@pytest.mark.parametrize("make", [trl, cards])
def test_the_file_runs_once_for_all_episodes(file: Path, make: Any) -> None:
    with EnvironmentPool(make(file, isolation="thread")) as pool:
        assert {start.observation for start in reset(pool, *range(3)).values()} == {"as the file has it"}
    assert file.with_suffix(".log").read_text().split() == ["run"]


def test_a_relative_path_is_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"class Made:\n    def reset(self):\n        return {name!r}\n")
    seen = []
    for name in ("one", "other"):
        monkeypatch.chdir(tmp_path / name)
        seen.append(TRLEnvironment(factory="mine.py:Made").reset(seed=0, row={})[0])
    assert seen == ["one", "other"]


def test_what_has_no_name_is_refused_in_one_line() -> None:
    made = TRLEnvironment(factory=lambda: None)
    with pytest.raises(ValueError, match="set isolation to 'thread'"):
        EnvironmentPool(made).start()
