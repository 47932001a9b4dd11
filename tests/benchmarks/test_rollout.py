"""``benchmarks/rollout.py``: the limit that a rollout is compared with is one."""

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("rollout")


def test_the_products_of_a_token_are_one_launch(rollout: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one graph for each number of rows, or the host that launches 97 products a token would be measured."""
    captured, launched = list[int](), Counter[int]()

    def capture(work, device):
        number = len(captured)
        captured.append(number)

        def launch() -> None:
            launched[number] += 1
            work()

        return launch

    monkeypatch.setattr(rollout, "captured", capture)
    cell = replace(rollout.SMALL, layers=2, prompts=2, group=2)
    run = rollout.products_alone(cell, [3, 5, 5, 7], "cpu", packed=False)
    assert captured == [0, 1, 2]  # of four, three and one rows that go on after a token
    run()
    assert launched == {0: 2, 1: 2, 2: 2}
