"""Work behind answers, worked out by hand, and that its last line gives the answer of every entry."""

import pytest
from reasoning_gym.factory import create_dataset

from grpo_pl.data.tasks.worked import euclid, halving, isolated, running_totals, worked


def test_running_totals_by_hand() -> None:
    assert running_totals("4 + 3 - 9") == ["4+3=7", "7-9=-2"]
    assert running_totals("-14 - 3") == ["-14-3=-17"]


def test_euclid_by_hand() -> None:
    assert euclid([9, 12]) == ["12-1*9=3", "9-3*3=0"]
    assert euclid([12, 18, 4]) == ["18-1*12=6", "12-2*6=0", "6-1*4=2", "4-2*2=0"]


def test_halving_by_hand() -> None:
    assert halving(5) == ["5:1", "2:1", "1:2"]
    assert halving(0) == []


def test_equations_by_hand() -> None:
    assert isolated("56 - 98*e = -1218") == ["98*e=1274", "127-1*98=29", "294-3*98=0"]
    assert isolated("x + 3 = 5") == ["1*x=2", "2-2*1=0"]
    assert isolated("0 = 0") == []  # any value is right
    assert isolated("(x + 1)*2 = 4") == []  # no sum of terms


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ("gcd", lambda lines: lines[-1].split("*")[1].split("=")[0]),  # the last divisor
        ("count_bits", lambda lines: lines[-1].split(":")[1]),
        ("simple_equations", lambda lines: "".join(line.split("-")[1].split("*")[0] for line in lines[1:])),
        ("chain_sum", lambda lines: lines[-1].split("=")[1]),
    ],
)
def test_the_work_ends_in_the_answer(task: str, result: object) -> None:
    shown = 0
    for entry in create_dataset(task, size=200, seed=3):
        lines = worked(task, entry["metadata"]).splitlines()
        if lines:
            shown += 1
            assert result(lines) == entry["answer"], (entry, lines)  # type: ignore[operator]
    assert shown > 150


def test_tasks_without_known_work_have_none() -> None:
    assert worked("spell_backward", {"word": "sun"}) == ""
