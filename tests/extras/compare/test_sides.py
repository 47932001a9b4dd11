"""Which problems two sides have in common."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.extras.compare.sides import Side, common_problems
from grpo_pl.types import Problem

SIDES: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]


def _set(*questions: str) -> list[Problem]:
    return [Problem(id=i, question=question, answer="4") for i, question in enumerate(questions)]


def test_common_problems_keep_their_order_and_sets_and_a_limit_is_of_each_set() -> None:
    ours = {"val": _set("a", "b", "c"), "val/more": _set("x", "y")}
    theirs = {"val": list(reversed(_set("a", "b", "c", "d"))), "val/else": _set("z")}
    found, line = common_problems(SIDES, [ours, theirs], None)
    assert found == {"val": _set("a", "b", "c")} and line == "3 of 5 held-out problems are those of both."
    assert common_problems(SIDES, [ours, ours], 2) == ({"val": _set("a", "b"), "val/more": _set("x", "y")}, "")
    assert common_problems(SIDES, [None, ours], None) == (ours, "")


def test_another_text_or_answer_of_one_id_is_another_problem() -> None:
    one, two = {"val": _set("a", "b")}, {"val": _set("a", "c")}
    with pytest.raises(ValueError, match="different held-out problems: 1 of val is 'b' in one and 'c' in the other"):
        common_problems(SIDES, [one, two], None)
    gold = {"val": [Problem(id=0, question="a", answer="5")]}
    with pytest.raises(ValueError, match="different held-out problems"):
        common_problems(SIDES, [one, gold], None)


def test_two_runs_of_a_name_are_both_named(tmp_path: Path) -> None:
    for name in ("mine", "mine-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".name").write_text("mine")
    with pytest.raises(ValueError, match=r"mine-2 and .*mine are runs of the name 'mine': give the folder of one"):
        Side.open("mine", runs_dir=tmp_path, trust_rewards=False)
