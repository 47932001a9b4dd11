"""Curves out of ``metrics.csv``, by hand."""

import csv
from pathlib import Path

import pytest
from rich.console import Console

from grpo_pl.evaluation.curves import read_curves
from grpo_pl.tools.comparison import moving_average, results_table, write_curves

METRICS = """step,reward,completions/mean_length_correct,completions/mean_length_wrong,entropy,step_time,val/pass@1
0,,,,,,0.25
1,0.5,10.0,20.0,1.5,2.0,
2,0.75,,22.0,1.25,4.0,
2,,,,,,0.5
"""


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.csv"
    file.write_text(METRICS)
    return file


def test_the_csv_has_a_row_per_run_and_rollout(metrics: Path, tmp_path: Path) -> None:
    run = read_curves(metrics)
    write_curves(tmp_path / "curves.csv", {"a": run, "b": run})
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["algorithm", "rollout", "reward", "length_correct", "length_wrong", "kl", "entropy"]
    assert rows[1:3] == [["a", "1", "0.5", "10.0", "20.0", "", "1.5"], ["a", "2", "0.75", "", "22.0", "", "1.25"]]
    assert [row[0] for row in rows[3:]] == ["b", "b"]


def test_the_table_says_before_after_and_where_curves_ended(metrics: Path) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table({"a": read_curves(metrics)}))
    row = next(line for line in capture.get().splitlines() if line.split()[:1] == ["a"])
    assert row.split() == ["a", "0.250", "→", "0.500", "0.750", "10.0", "22.0", "–", "1.250", "3.00"]


def test_the_table_says_what_a_teacher_takes(metrics: Path, tmp_path: Path) -> None:
    lines = METRICS.splitlines()
    file = tmp_path / "taught.csv"
    cells = ("time/teacher", "", "0.5", "0.25", "")
    file.write_text("\n".join([f"{line},{cell}" for line, cell in zip(lines, cells, strict=True)] + [""]))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table({"a": read_curves(metrics), "b": read_curves(file)}))
    rows = {line.split()[0]: line.split() for line in capture.get().splitlines()[1:]}
    assert rows["algorithm"][-2:] == ["teacher,", "s"]
    assert (rows["a"][-1], rows["b"][-1]) == ("0.00", "0.38")


def test_the_table_says_how_many_completions_could_not_be_judged(metrics: Path, tmp_path: Path) -> None:
    lines = METRICS.splitlines()
    file = tmp_path / "unjudged.csv"
    file.write_text("\n".join([f"{lines[0]},val/unjudged", f"{lines[1]},9", *lines[2:4], f"{lines[4]},3", ""]))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table({"a": read_curves(metrics), "b": read_curves(file)}))
    assert "could not be judged and count nowhere: b: 3" in capture.get()


@pytest.mark.parametrize(("names", "measured"), [("ab", "pass@1"), ("b", "val/reward")])
def test_one_run_without_correctness_hides_the_pass_at_1_of_no_other(
    metrics: Path, tmp_path: Path, names: str, measured: str
) -> None:
    file = tmp_path / "rewarded.csv"
    file.write_text(METRICS.replace("val/pass@1", "val/reward").replace(",0.25\n", ",1.25\n"))
    runs = {"a": read_curves(metrics), "b": read_curves(file)}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results_table({name: runs[name] for name in names}))
    shown = capture.get()
    assert f"held-out {measured}, then" in shown
    rows = {line.split()[0]: line.split()[1:4] for line in shown.splitlines() if line.split()[:1] in (["a"], ["b"])}
    if names == "b":
        assert rows == {"b": ["1.250", "→", "0.500"]} and "no reward says" not in shown
    else:
        assert rows["a"] == ["0.250", "→", "0.500"] and rows["b"][0] == "–"
        assert "held-out reward where no reward says what is right: b: 1.250 → 0.500" in shown


def test_moving_averages_are_centred_and_shrink_at_the_ends() -> None:
    assert moving_average([1.0, 2.0, 6.0, 4.0, 7.0], 1) == pytest.approx([1.0, 3.0, 4.0, 17 / 3, 7.0])
    assert moving_average([1.0, 2.0, 6.0, 4.0, 7.0], 9) == pytest.approx([1.0, 3.0, 4.0, 17 / 3, 7.0])
    assert moving_average([3.0, 5.0], 0) == [3.0, 5.0]
