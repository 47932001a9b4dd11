"""The page of a comparison: whole, self-contained, safe whatever a policy wrote, and readable in a real browser."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.extras.compare.compared import Comparison
from grpo_pl.extras.compare.page import MOST, default_place, page_data, write_page
from grpo_pl.extras.compare.paired import Answer, Pair, PairedProblems
from grpo_pl.files.runs import RunFolder
from grpo_pl.types import Problem
from tests.browser import Browser, needs_browser
from tests.extras.report.conftest import browser  # noqa: F401 - a fixture
from tests.extras.report.runs import HOSTILE


def _answers(*verdicts: bool | None, text: str = "") -> list[Answer]:
    told = [f"<think>{i}</think>\\boxed{{{i}}}{text}" for i in range(len(verdicts))]
    return [
        Answer(text=one, correct=each, tokens=7, finish_reason="stop") for one, each in zip(told, verdicts, strict=True)
    ]


def _pair(number: int, a: bool, b: bool, text: str = "") -> Pair:
    problem = Problem(id=number, question=text or f"{number}+{number}", answer=text or str(2 * number))
    return Pair(problem=problem, a=_answers(a, a, False, text=text), b=_answers(b, b, True, text=text))


def comparison(folder: Path, name: str = "b", *, flips: int = 3) -> Comparison:
    """30 problems that both solve, 20 that neither does, and some that the second gained, and one that it lost."""
    verdicts = [(True, True)] * 30 + [(False, False)] * 20 + [(False, True)] * flips + [(True, False)]
    pairs = [_pair(i, a, b) for i, (a, b) in enumerate(verdicts)]
    side: Any = SimpleNamespace(name="a", model=SimpleNamespace(source=folder / "a"), run=RunFolder(folder / "a"))
    other: Any = SimpleNamespace(name=name, model=SimpleNamespace(source=folder / "b"), run=None)
    few = PairedProblems.of([Pair(problem=p.problem, a=p.a[:1], b=p.b[:1]) for p in pairs])
    hostile = PairedProblems.of([*pairs, _pair(99, False, True, HOSTILE)])
    return Comparison(
        a=side,
        b=other,
        samples=3,
        temperature=1.0,
        seed=0,
        shared_keys=False,
        notes=["their tokenizers differ " + HOSTILE],
        sets={"val": hostile, "val/few": few},
        settings=[f"model.optimization.lr: 0.001 → {HOSTILE}"],
    )


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found and "<" not in found[1]
    return json.loads(found[1])


def test_the_page_needs_nothing_from_outside_and_texts_stay_data(tmp_path: Path) -> None:
    page = write_page(comparison(tmp_path, HOSTILE), tmp_path / "new" / "c.html").read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:,\")", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    assert page.count("</script>") == 2 and "<title>a · &lt;/script&gt;" in page
    held_out, few = _data(page)["sets"]
    assert held_out["cells"] == {"both": 30, "only_a": 1, "only_b": 4, "neither": 20}
    assert [one["gained"] for one in held_out["flipped"]] == [True] * 4 + [False]
    assert held_out["flipped"][3]["question"] == HOSTILE
    assert [one["method"] for one in few["intervals"]] == ["agresti-min", "bootstrap"]
    assert _data(page)["settings"] == [["model.optimization.lr", f"0.001 → {HOSTILE}"]]


def test_a_page_of_many_flips_has_some_and_says_how_many_more(tmp_path: Path) -> None:
    (_, few) = page_data(comparison(tmp_path, flips=MOST))["sets"]
    assert len(few["flipped"]) == MOST // 2 + 1 and few["left_out"] == MOST // 2


def test_it_lies_beside_the_run_of_the_first_and_is_no_folder(tmp_path: Path) -> None:
    assert default_place(comparison(tmp_path, "two/b c")) == tmp_path / "compare-a-two-b-c.html"
    with pytest.raises(ValueError, match="is a folder: name a file"):
        write_page(comparison(tmp_path), tmp_path)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_can_be_read_on_any_screen(
    browser: Browser,  # noqa: F811 - the fixture
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    page = write_page(comparison(tmp_path, HOSTILE), tmp_path / "c.html")
    browser.show_at(width, scheme=scheme)
    browser.open(page.as_uri())
    assert browser.low_contrasts() == [] and browser.overflow() <= 0 and browser.nameless() == []
    assert browser.console() == []
    assert browser.run("return document.title").startswith("a · </script>")
    assert browser.count("img, body script:not(#data)") == 1  # the page's own
    tiles = browser.texts(".set:first-child .tile .value")
    assert tiles[2:4] == ["+0.370", "p = 0.375"]
    assert browser.texts(".set:first-child .shown .card:first-child dd") == ["30", "4", "1", "20"]
    assert browser.count(".set:first-child svg .whisker-line") == 2
    assert browser.run("return document.querySelectorAll('[x1=NaN], [cx=NaN]').length") == 0
    browser.open_details(".set:first-child details")
    assert browser.count(".set:first-child .problem .side") == 10
    assert any(HOSTILE in text for text in browser.texts(".completion .text"))
    assert browser.low_contrasts() == [] and browser.overflow() <= 0


@needs_browser
def test_without_flips_settings_or_notes_nothing_empty_stands_there(
    browser: Browser,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    found = comparison(tmp_path)
    same = PairedProblems.of([_pair(i, True, True) for i in range(4)])
    bare = Comparison(**{**vars(found), "notes": [], "settings": [], "sets": {"val": same}})
    browser.show_at(1280)
    browser.open(write_page(bare, tmp_path / "c.html").as_uri())
    assert browser.console() == []
    assert browser.texts(".flips") == ["No problem flipped."]
    assert browser.run("return ['notes', 'settings'].every(id => document.getElementById(id).hidden)")
