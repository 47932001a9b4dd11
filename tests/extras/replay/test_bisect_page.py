"""The page of a search: whole, self-contained and safe whatever was asked and written; opened in a real browser."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_pl.extras.replay.bisect_page import build_page, write_page
from grpo_pl.extras.replay.bisection import Bisection, conclusions
from grpo_pl.extras.replay.left_out import Group
from tests.browser import Browser, needs_browser
from tests.extras.report.runs import HOSTILE

CURVE = [(0, -20.0), (1, -19.5), (2, -14.5), (3, -14.0)]
SHOWN = Group(kind="demonstrations", question=HOSTILE, answer=HOSTILE, size=1, without=-19.25, moved=4.75, lasting=5.5)
DRAWN = Group(
    kind="completions",
    question="2+2=",
    answer="4",
    size=8,
    right=3,
    prompt_id=12,
    sample=5,
    without=-14.0,
    moved=-0.5,
    lasting=0.25,
)
FOUND = Bisection(
    run="runs/<b>demo",
    question=HOSTILE,
    answer="4",
    prompt=HOSTILE,
    scored=HOSTILE,
    origin=HOSTILE,
    tokens=5,
    curve=CURVE,
    lowest=0,
    highest=3,
    steepest=1,
    looked_at=1,
    at_once=5.0,
    lasting=4.0,
    coasted=0.0,
    step=1,
    groups=[SHOWN, DRAWN],
    all_groups=9,
    states=1,
    every=2,
    held_to="32 completions",
    exact=True,
    other_here=[],
)


def test_the_page_needs_nothing_from_outside_and_texts_stay_data() -> None:
    page = build_page(FOUND)
    assert not re.search(r"(src|href)=\"(?!#|data:,\")", page)
    assert page.count("</script>") == 2 and "onerror=" in page
    assert "<title>&lt;b&gt;demo: when was it learned?" in page


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {},
            [
                "step 1 (rollout 2) taught it",
                "its demonstration did: without it the update moves the answer by +0.25",
            ],
        ),
        ({"groups": [DRAWN]}, ["step 1 (rollout 2) taught it", "no single group of it did"]),
        (  # a stronger group worked against the answer
            {"groups": [replace(DRAWN, moved=-3.0), replace(SHOWN, moved=2.9)], "at_once": 2.0},
            [
                "step 1 (rollout 2) taught it",
                "its demonstration did: without it the update moves the answer by -0.90 at once",
            ],
        ),
        (
            {"groups": [replace(DRAWN, moved=-3.0), replace(SHOWN, moved=0.5)], "at_once": 2.0},
            [
                "step 1 (rollout 2) taught it",
                "without demonstration, which raised the answer most, the update still moves it by +1.50",
            ],
        ),
        ({"step": None}, ["no single step did it: of 6.00 nats between 0 and 3 rollouts"]),
        (
            {"curve": [(0, -20.0), (1, -20.5)], "highest": 0, "steepest": None, "step": None},
            ["it was not learned in this run: its log-probability rose by 0.00 nats at most"],
        ),
    ],
)
def test_what_is_concluded_names_what_there_is(changes: dict[str, object], told: list[str]) -> None:
    lines = conclusions(replace(FOUND, **changes))  # type: ignore[arg-type]
    assert all(part in line for part, line in zip(told, lines, strict=False))
    assert len(lines) == len(told) + 1 and lines[-1] == "held to the record: 32 completions, bit for bit."


def test_the_culprit_is_the_group_that_raised_the_answer_most_whatever_worked_against_it() -> None:
    against, taught = replace(DRAWN, moved=-3.0), replace(SHOWN, moved=2.9)
    found = replace(FOUND, groups=[against, taught], at_once=2.0)
    assert found.culprit is taught and found.as_json()["culprit"]["moved"] == 2.9
    assert replace(found, step=None).culprit is None and replace(found, groups=[against]).culprit is None
    assert replace(found, at_once=5.9).culprit is None  # half of that would be 2.95


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "bisect.html"
    write_page(FOUND, file)
    return file.as_uri()


@needs_browser
def test_nothing_that_was_written_runs_and_every_part_is_there(browser: Browser, address: str) -> None:
    browser.show_at(1280)
    browser.open(address)
    assert browser.run("return document.title").startswith("<b>demo: when")
    assert browser.count("img, body script:not(#data)") == 1  # the page's own
    assert browser.texts("#problem pre") == [HOSTILE] and browser.texts("#problem .text") == [HOSTILE]
    assert browser.texts("#conclusions li") == conclusions(FOUND)
    assert browser.texts("#charts h3") == ["Log-probability nats"]
    assert browser.texts("#members pre") == [HOSTILE, "2+2="] and browser.texts("#members .text") == [HOSTILE, "4"]
    assert browser.texts("#members .advantage b") == ["+4.75", "−0.50"]
    assert browser.texts("#members article:last-child .chip") == [
        "completions of 12",
        "in all +0.25",
        "without it −14.00 nats",
        "3 of 8 right",
    ]
    assert "the 2 of 9 that moved it most" in browser.texts("#step")[0]
    assert browser.count("#members .mine") == 1 and browser.run("return document.querySelector('#why').hidden")
    loaded = "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    assert browser.run(f"return {loaded}") == []
    assert browser.console() == []


@needs_browser
def test_the_culprit_is_marked_though_another_group_moved_the_answer_more(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bisect.html"
    write_page(replace(FOUND, groups=[replace(DRAWN, moved=-6.0), SHOWN]), file)
    browser.open(file.as_uri())
    assert browser.count("#members .mine") == 1 and browser.texts("#members .mine pre") == [HOSTILE]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_any_screen(browser: Browser, address: str, scheme: str) -> None:
    browser.show_at(1280, scheme=scheme)
    browser.open(address)
    browser.open_details()
    for width in (1280, 390):
        browser.show_at(width, scheme=scheme)
        assert browser.low_contrasts() == []
        assert browser.overflow() <= 0
        assert browser.nameless() == []


@needs_browser
def test_an_answer_that_was_not_learned_has_a_page_and_completions_a_command(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bisect.html"
    write_page(replace(FOUND, steepest=None, looked_at=None, step=None, groups=[]), file)
    browser.open(file.as_uri())
    assert browser.run("return document.querySelector('#groups').hidden")
    write_page(replace(FOUND, groups=[replace(DRAWN, moved=4.5)]), file)
    browser.open(file.as_uri())
    assert browser.texts("#why code") == ["grpo-pl why 'runs/<b>demo' --step 1 --prompt 12 --sample 5"]
    assert browser.console() == []
