"""The environment on the page plays as the page says, and its classes are where it says."""

import re
from pathlib import Path

import pytest

from grpo_pl.environments import EnvironmentPool, play

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def test_the_environment_on_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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
    assert len(rows) == 5
    for name, module in rows:
        assert hasattr(import_module(f"grpo_pl.environments.{module}"), name)
