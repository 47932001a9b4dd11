"""The picture of the credit for single turns comes out of its script, from episodes that Gymnasium plays."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, loaded

SCRIPT = ROOT / "docs" / "plots" / "turn_credit.py"


@pytest.fixture
def script() -> Any:
    pytest.importorskip("gymnasium")
    return loaded(SCRIPT)


def test_the_figures_are_those_of_the_page(script: Any) -> None:
    group = script.played()
    assert group.rewards.sum(1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert group.fields[3] == ["a1", "b1"] and group.fields[1][:3] == ["a1", "a2", "a1"]
    table = script.advantages(group)
    assert table["turn_returns"][0, 4:].tolist() == [0.0, 0.0, 0.0, 0.0]  # whoever stood there arrived
    assert table["turn_returns"][2, 3] == -1.0 and table["turn_returns"][0, 0] == 0.5
    assert table["gigpo"][0, 0].item() == pytest.approx(0.5 + 1 - 3 / 5)  # of five turns in a1 three led to the goal


def test_the_picture_is_drawn_and_the_files_beside_the_script_are_its_own(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(sys, "argv", ["turn_credit.py", "--out", str(tmp_path)])
    script.main()
    assert (tmp_path / "turn_credit.png").read_bytes().startswith(b"\x89PNG")
    written, kept = (list(csv.reader((f / "turn_credit.csv").open())) for f in (tmp_path, SCRIPT.parent))
    assert written == kept and len(written) == 21
