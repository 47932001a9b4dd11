"""The page of one completion: whole, self-contained and safe whatever the policy wrote; opened in a real browser."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_pl.extras.replay.arithmetic import Line
from grpo_pl.extras.replay.explanation import Explanation, Later, Member, Other, Rewarded, Step, Token
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.extras.replay.why_page import build_page, page_file, write_page
from grpo_pl.files.runs import RunFolder
from tests.browser import Browser, needs_browser
from tests.extras.report.runs import HOSTILE

TEXTS = ["<think>", HOSTILE, "\n", "4", "<eos>"]
CHANCES = [0.95, 0.02, 0.5, 0.3, 0.99]


def _token(place: int) -> Token:
    others = [Other(text=HOSTILE if place == 1 else "7", id=7, probability=0.6), Other(text=" ", id=8, probability=0.1)]
    return Token(
        text=TEXTS[place],
        id=place,
        written=True,
        logprob=-0.5 - place,
        after=-0.25 - place,
        probability=CHANCES[place],
        entropy=0.5 * place,
        others=others,
        advantage=-0.75,
        ratio=0.9,
        clipped=place == 3,
        weight=0.125,
        pull=0.0 if place == 3 else -0.09375,
    )


def _member(sample: int, text: str) -> Member:
    return Member(
        sample=sample,
        completion=text,
        correct=sample == 1,
        tokens=5,
        finish_reason="stop",
        reward=float(sample),
        advantage=sample - 0.5,
        in_loss=sample == 0,
        before=-3.0,
        after=-2.5 - sample,
    )


def _later(rollouts: int, parts_at: int | None) -> Later:
    return Later(
        rollouts=rollouts,
        completion=HOSTILE if parts_at is None else "\\boxed{4}",
        correct=parts_at is not None,
        tokens=5,
        finish_reason="length",
        reward=0.5,
        parts_at=parts_at,
        here="" if parts_at is None else HOSTILE,
        there="" if parts_at is None else "4",
    )


EXPLANATION = Explanation(
    run="runs/<b>demo",
    step=20,
    prompt_id=12,
    sample=0,
    question=HOSTILE,
    answer="4",
    prompt=HOSTILE,
    completion="".join(TEXTS),
    finish_reason="stop",
    correct=False,
    reward=0.25,
    advantage=-0.75,
    drawn_again=True,
    held_to="32 completions",
    exact=True,
    other_here=[],
    rewards=[Rewarded(name="math", weight=1.0, value=None, status="bad_gold", detail=HOSTILE)],
    arithmetic=[Line("reward", HOSTILE, 0.25), Line("divided by it", "0.25 / 0.5", -0.75)],
    group=[_member(0, "".join(TEXTS)), _member(1, HOSTILE)],
    steps=[Step(number=0, ratio=1.0, clipped=0.0, pull=-0.5), Step(number=2, ratio=0.9, clipped=0.2, pull=-0.375)],
    tokens=[*map(_token, range(5)), Token(text="observed", id=9, written=False)],
    later=[_later(21, None), _later(40, 3)],
)


def test_the_page_needs_nothing_from_outside_and_texts_stay_data() -> None:
    page = build_page(EXPLANATION)
    assert not re.search(r"(src|href)=\"(?!#|data:,\")", page)
    assert page.count("</script>") == 2 and "onerror=" in page
    assert "<title>&lt;b&gt;demo, rollout 21" in page


def test_it_is_never_written_into_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run = RecordedRun(RunFolder(tmp_path / "run"))
    assert page_file(run, None, "why-run-1-2-3") == tmp_path / "why-run-1-2-3.html"
    for wrong in (tmp_path / "run" / "why.html", tmp_path / "run" / "checkpoints" / "x.html", tmp_path):
        with pytest.raises(CannotReplay, match="--page"):
            page_file(run, wrong, "why")
    with pytest.raises(CannotReplay, match="in a folder that is there"):
        page_file(run, tmp_path / "nowhere" / "why.html", "why")


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "why.html"
    write_page(EXPLANATION, file)
    return file.as_uri()


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    browser.show_at(1280)
    browser.open(address)
    return browser


@needs_browser
def test_nothing_that_was_written_runs_and_every_part_is_there(page: Browser) -> None:
    assert page.run("return document.title").startswith("<b>demo, rollout 21")
    assert page.count("img, body script:not(#data)") == 1  # the page's own
    assert page.texts("#problem pre") == [HOSTILE] and page.texts("#problem .gold b") == ["4"]
    assert page.texts("#completion .text") == ["".join(TEXTS)]
    assert page.texts("#text .t") == [*TEXTS, "observed"]
    assert page.texts("#charts h3") == ["Log-probability nats", "Entropy nats"]
    assert page.texts("#arithmetic tbody tr:first-child td")[0] == HOSTILE
    assert HOSTILE in page.texts("#members .text") and HOSTILE in page.texts("#answers .text")
    chips = page.texts("#answers .completion:last-child .chip")
    assert "after 40 rollouts" in chips and any(chip.startswith("other from token 3 on: 4 → ") for chip in chips)
    assert "the answer is right first under the weights after 40 rollouts." in page.texts("#conclusions li")
    loaded = "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    assert page.run(f"return {loaded}") == []
    assert page.console() == []


@needs_browser
def test_a_token_is_chosen_by_the_keyboard_or_a_pointer(page: Browser) -> None:
    kinds = "return [...document.querySelectorAll('#text .t')].map(t => t.classList[1])"
    assert page.run(kinds) == ["likely", "unlikely", "unsure", "unsure", "likely", "read"]
    chosen = "return document.querySelector('#text').getAttribute('aria-valuetext')"
    assert page.run(chosen).endswith("probability 0.020")  # it opens on the least likely one
    page.run("document.querySelector('#text').focus()")
    page.press("Right", "Right")
    assert page.run(chosen) == "3: 4, probability 0.300"
    facts = page.texts("#token dd")
    assert facts[:2] == ["3: 4", "0.300"] and "yes" in facts and "−0.75" in facts
    assert page.texts("#token .kind code") == ["4", "7", " "]
    page.click("#text .t:first-child")
    assert page.run(chosen) == "0: <think>, probability 0.950"


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
def test_a_completion_without_tokens_or_later_weights_has_a_page_as_well(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "why.html"
    write_page(replace(EXPLANATION, tokens=[], steps=[], later=[], drawn_again=None), file)
    browser.open(file.as_uri())
    assert browser.texts("#members .completion .verdict") == ["wrong", "right"]
    assert browser.run("return [...document.querySelectorAll('#tokens, #later')].every(s => s.hidden)")
    assert browser.console() == []
