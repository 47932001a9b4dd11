"""The report of several runs."""

from pathlib import Path

import pytest

from grpo_pl.extras.report.page import comparison_data, write_comparison
from grpo_pl.files.runs import RunFolder
from tests.browser import Browser, needs_browser
from tests.extras.report.runs import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, seed=seed) for seed, name in enumerate(("a", "b"))]


def test_settings_that_differ_stand_side_by_side(runs: list[RunFolder]) -> None:
    data = comparison_data({run.path.name: run for run in runs})
    assert data["differences"] == [["setting", "a", "b"], ["model.seed", "0", "1"]]
    assert ["seed", "0", "1"] in data["facts"] and data["facts"][0] == ["", "a", "b"]
    assert [(tile["label"], tile["value"]) for tile in data["tiles"]] == [("a", 0.7), ("b", 0.7)]


def test_runs_of_one_name_bear_that_of_their_folder(tmp_path: Path) -> None:
    page = write_comparison([write_run(tmp_path / place / "x") for place in ("one", "two")], tmp_path / "c.html")
    assert "<title>one/x · two/x – grpo-pl</title>" in page.read_text()
    deeper = [write_run(tmp_path / place / "runs" / "x") for place in ("a", "b")]
    page = write_comparison([*deeper, write_run(tmp_path / "y")], tmp_path / "d.html")
    assert "<title>a/runs/x · b/runs/x · y – grpo-pl</title>" in page.read_text()


def test_one_run_twice_and_a_folder_that_is_no_run_are_refused(runs: list[RunFolder], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is given twice"):
        write_comparison([runs[0], runs[0]], tmp_path / "c.html")
    with pytest.raises(ValueError, match=r"holds no metrics\.csv"):
        write_comparison([runs[0], RunFolder(tmp_path)], tmp_path / "c.html")
    with pytest.raises(ValueError, match="is a folder"):
        write_comparison(runs, tmp_path)


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_has_a_line_for_each_run(
    browser: Browser, runs: list[RunFolder], tmp_path: Path, width: int, scheme: str
) -> None:
    page = write_comparison(runs, tmp_path / "comparison.html")
    browser.show_at(width, scheme=scheme)
    browser.open(page.as_uri())
    assert browser.console() == []
    assert browser.texts("#charts .chart:first-child .legend span") == ["a0.750", "b0.850"]
    assert browser.count("#charts .chart:first-child .curve") == 2
    assert browser.texts(".problem[open] h4") == ["a", "b"]
    assert browser.run("return document.getElementById('samples').hidden")
    assert browser.low_contrasts() == [] and browser.overflow() <= 0 and browser.nameless() == []
