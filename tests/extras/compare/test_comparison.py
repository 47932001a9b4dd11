"""Curves out of ``metrics.csv``, by hand."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.extras.compare.comparison import results_table

METRICS = """step,reward,completions/mean_length_correct,completions/mean_length_wrong,entropy,step_time,val/pass@1
0,,,,,,0.25
1,0.5,10.0,20.0,1.5,2.0,
2,0.75,,22.0,1.25,4.0,
2,,,,,,0.5
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """``run(text)``: the curves of a ``metrics.csv``."""

    def read(text: str = METRICS) -> dict[str, Points]:
        (tmp_path / "metrics.csv").write_text(text)
        return read_curves(tmp_path / "metrics.csv")

    return read


def _with_column(*cells: str) -> str:
    return "".join(f"{line},{cell}\n" for line, cell in zip(METRICS.splitlines(), cells, strict=True))


def _table(**runs: dict[str, Points]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table(runs))
    return capture.get()


def _rows(table: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}


def test_the_table_says_before_after_and_where_curves_ended(run: Any) -> None:
    expected = ["0.250", "→", "0.500", "0.750", "10.0", "22.0", "–", "1.250", "3.00"]
    assert _rows(_table(a=run()))["a"] == expected


def test_the_table_says_what_a_teacher_takes(run: Any) -> None:
    rows = _rows(_table(a=run(), b=run(_with_column("time/teacher", "", "0.5", "0.25", ""))))
    assert rows["run"][-2:] == ["teacher,", "s"]
    assert (rows["a"][-1], rows["b"][-1]) == ("0.00", "0.38")


def test_the_table_says_how_many_completions_could_not_be_judged(run: Any) -> None:
    shown = _table(a=run(), b=run(_with_column("val/unjudged", "9", "", "", "3")))
    assert "could not be judged and count nowhere: b: 3" in shown


def test_one_run_without_correctness_hides_the_pass_at_1_of_no_other(run: Any) -> None:
    rewarded = run(METRICS.replace("val/pass@1", "val/reward").replace(",0.25\n", ",1.25\n"))
    alone, both = _table(b=rewarded), _table(a=run(), b=rewarded)
    assert "held-out val/reward, then" in alone and "no reward says" not in alone
    assert _rows(alone)["b"][:3] == ["1.250", "→", "0.500"]
    assert "held-out pass@1, then" in both
    assert _rows(both)["a"][:3] == ["0.250", "→", "0.500"] and _rows(both)["b"][0] == "–"
    assert "held-out reward where no reward says what is right: b: 1.250 → 0.500" in both
