"""The page in a real headless Chromium, at work with a real server."""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.browser import Browser, needs_browser, until

pytestmark = needs_browser
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"enum": ["12*7"]}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
SCRIPTED = (
    "const read = eventsOf; eventsOf = async function* (response) { for await (const event of read(response)) {"
    "for (const c of event.choices) { if (c.delta.role) c.delta.content = window.scripted[c.index] ?? '';"
    "else delete c.delta.content } yield event; } }"
)
"""Has the samples say what a test needs to be said: random weights say nothing in particular."""


@pytest.fixture
def page(server: Any, browser: Browser) -> Browser:
    browser.show_at(1280)
    browser.console()  # an earlier page's
    browser.open(server.address + "/")
    until(lambda: "tiny" in browser.text("#model"))
    return browser


def _sample(page: Browser, n: int, *, problem: str = "12+34=", answer: str = "46") -> None:
    page.fill("problem", problem)
    page.fill("answer", answer or " ")
    page.fill("n", str(n))
    page.click("#go")
    until(lambda: "tokens" in page.text("#group") or page.text("#error"))
    assert page.text("#error") == ""


def _say(page: Browser, *texts: str) -> None:
    page.run("window.scripted = arguments[0]", list(texts))
    page.run(SCRIPTED)


def test_a_problem_is_typed_streams_in_and_gets_its_rewards(page: Browser) -> None:
    box = "const b = document.getElementById('go').getBoundingClientRect(); return [b.y, b.width, b.height]"
    before = page.run(box)
    page.run(
        "window.boxes = []; const real = fetch; window.fetch = (...given) => {"
        "boxes.push(document.getElementById('go').textContent, (() => {" + box + "})()); return real(...given) }"
    )
    page.run(
        "const read = eventsOf; window.pieces = 0; eventsOf = async function* (response) {"
        "for await (const event of read(response)) { pieces += event.choices[0].delta.content ? 1 : 0; yield event; } }"
    )
    _sample(page, 5)
    assert page.count("article") == page.count("article.right, article.wrong") == 5
    assert page.run("return pieces") > 5 + 1  # the prefill of each, and what was drawn in more than one piece
    assert page.text("article .think")
    advantages = [float(text.replace("−", "-")) for text in page.texts("article .advantage b")]
    assert len(advantages) == 5 and sum(advantages) == pytest.approx(0.0, abs=0.05)
    assert "dr_grpo" in page.texts("article .judged .chip")
    assert page.text("#formula") == "Advantage (dr_grpo): reward − mean"
    tokens = [int(text.split()[0]) for text in page.texts("article .length")]
    assert f"+ {sum(tokens)}" in page.text("#group") and all(0 < count <= 40 for count in tokens)
    assert page.run("return boxes") == ["Stop", before] * 2 and page.run(box) == before  # the button stays where it is
    assert page.console() == []


def test_a_group_is_counted_sorted_and_drawn(page: Browser) -> None:
    _say(page, *(rf"<think></think>\boxed{{{said}}}" for said in ("46", "9", "46", "10", "46", "9")))
    _sample(page, 6)
    shown = page.run("return [...document.querySelectorAll('.kind')].map(k => k.innerText)")
    kinds = [" ".join(text.split()) for text in shown]
    assert kinds == ["46 right ×3", "9 wrong ×2", "10 wrong ×1"]
    assert page.texts("article .gain") == ["+0.50", "−0.50", "+0.50", "−0.50", "+0.50", "−0.50"]  # reward − mean
    label = page.run("return document.querySelector('article:nth-of-type(2) .head').ariaLabel")
    assert label.startswith("sample 2, wrong, reward 0.1") and label.endswith(", advantage −0.50")
    figures = page.texts("#group .figure")
    assert "right 3" in figures and "wrong 3" in figures and not any("not judged" in text for text in figures)
    assert page.texts("#figures h3") == ["pass@k share", "Rewards samples", "Lengths samples"]
    page.open_details("#figures details")
    rows = page.run("return [...document.querySelectorAll('#figures table')[0].rows].map(r => r.innerText)")
    assert page.texts("#figures .legend")[0] == "pass@61.000"
    assert rows == ["k\tpass@k", "1\t0.500", "2\t0.800", "4\t1.000", "6\t1.000"]  # 1 − C(3, 2) / C(6, 2) = 0.8
    page.run("const s = document.getElementById('sort'); s.value = 'answer'; s.dispatchEvent(new Event('change'))")
    assert page.texts("article .said") == ["9", "9", "10", "46", "46", "46"]
    page.run("const s = document.getElementById('sort'); s.value = 'reward'; s.dispatchEvent(new Event('change'))")
    assert page.texts("article .number") == ["#1", "#3", "#5", "#2", "#4", "#6"]
    page.click(".kind.wrong")
    assert page.run("return [...document.querySelectorAll('article')].filter(a => !a.hidden).length") == 2
    page.click(".kind.wrong")
    assert page.run("return [...document.querySelectorAll('article')].filter(a => !a.hidden).length") == 6


def test_without_an_answer_there_are_completions_and_no_rewards(page: Browser) -> None:
    _sample(page, 2, answer="")
    assert page.count("article") == 2 and page.count(".judged") == 0
    assert "samples 2" in page.texts("#group .figure")
    assert page.texts("#figures h3") == ["Lengths samples"]
    assert set(page.texts(".kind .verdict")) == {""}  # nobody was asked


def test_what_could_not_be_judged_is_neither_right_nor_wrong(page: Browser) -> None:
    _say(page, *[r"\boxed{46}"] * 4)
    _sample(page, 4, answer=r"\frac{")  # no gold answer can be read from this
    assert page.count("article.not-judged") == 4 and page.count("article.right, article.wrong") == 0
    assert page.texts("article .head .verdict") == ["not judged"] * 4
    figures = page.texts("#group .figure")
    assert "not judged 4" in figures and "right 0" in figures and "wrong 0" in figures
    assert "could not be judged: bad gold" in page.text("article .judged")


def test_it_begins_with_a_problem_of_the_models_own_task(page: Browser) -> None:
    value = "return [document.getElementById('problem').value, document.getElementById('answer').value]"
    assert page.run(value) == ["12+34=", "46"]
    assert "trained with dr_grpo" in page.text("#model")


def test_the_first_screen_says_what_the_page_does_and_shows_a_whole_text(page: Browser) -> None:
    page.show_at(1280, 800)
    assert "the rewards of the training judge each one" in page.text(".about")
    assert "pass@k is the chance" in page.text(".about") and "how much better" in page.text(".about")
    _say(page, *[r"<think>12+34 is 46</think>\boxed{46}"] * 8)
    _sample(page, 8)
    assert page.count("article.open") == 1
    seen = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.top, b.bottom]"
    assert page.text("article.open .text") == r"<think>12+34 is 46</think>\boxed{46}"
    widths = "return [...document.querySelectorAll('#figures rect.fill')].map(r => r.getBoundingClientRect().width)"
    assert page.run(widths) and max(page.run(widths)) < 80  # equal values are no solid block
    assert page.run(seen, ".about")[0] >= 0 and page.run(seen, "article.open .text")[1] <= 800


def test_on_a_phone_samples_stand_before_charts(page: Browser) -> None:
    page.show_at(390)
    _sample(page, 8)
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    tops = [page.run(top, part) for part in ("#group", "#kinds", "#samples", "#figures")]
    assert tops == sorted(tops)


def test_an_answer_goes_with_its_problem(page: Browser) -> None:
    value = "return document.getElementById('answer').value"
    page.fill("problem", "2+2=")
    assert page.run(value) == ""
    page.fill("answer", "4")
    page.fill("n", "2")
    page.run(
        "const read = eventsOf; eventsOf = async function* (response) { yield* read(response);"
        "document.getElementById('answer').value = 'typed meanwhile' }"
    )
    page.run(
        "const real = fetch; window.fetch = (path, options) => {"
        "if (path === '/v1/score') window.scored = JSON.parse(options.body); return real(path, options) }"
    )
    page.click("#go")
    until(lambda: "tokens" in page.text("#group"))
    assert page.run("return scored.items.map(item => item.answer)") == ["4", "4"]
    assert "2+2=" in page.text("#group")


def test_a_seed_draws_the_same_again_and_settings_count(page: Browser) -> None:
    page.fill("seed", "7")
    page.fill("max_tokens", "5")
    _sample(page, 2, answer="")
    first = page.texts("article .body > .text")
    assert "seed 7" in page.texts("#group .figure")
    assert all(int(text.split()[0]) <= 5 for text in page.texts("article .length"))
    _sample(page, 2, answer="")
    assert page.texts("article .body > .text") == first
    page.fill("top_p", "0.01")
    _sample(page, 2, answer="")
    one, other = page.texts("article .body > .text")
    assert one == other  # all that is left is the likeliest token
    page.run("document.getElementById('seed').value = ''")
    _sample(page, 1, answer="")
    told = next(text for text in page.texts("#group .figure") if text.startswith("seed"))
    assert int(told.split()[1]) >= 0  # drawn here, and told, so that it can be typed


def test_the_request_runs_as_python_and_with_curl(page: Browser, server: Any) -> None:
    page.fill("problem", "12'+\"3\\4=")
    page.fill("seed", "3")
    page.fill("n", "2")
    page.open_details("#code")
    assert page.count(".snippet") == 2
    curl, program = page.texts(".snippet pre")
    environment = {**os.environ, "GRPO_PL_API_KEY": "none"}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    _sample(page, 2, problem="12'+\"3\\4=", answer="")
    assert [text for text in page.texts("article .body > .text") if text.strip() not in printed.stdout] == []
    if shutil.which("curl"):
        told = subprocess.run(["sh", "-c", curl], env=environment, capture_output=True, text=True, check=True)
        texts = [choice["message"]["content"] for choice in json.loads(told.stdout)["choices"]]
        assert texts == page.texts("article .body > .text")


def test_without_a_seed_the_request_has_that_of_the_group_on_the_screen(page: Browser) -> None:
    page.fill("seed", "")
    page.open_details("#code")
    _sample(page, 2)
    seed = next(text for text in page.texts(".figure") if text.startswith("seed ")).removeprefix("seed ")
    assert all(re.search(rf"seed\W+{seed}\b", text) for text in page.texts(".snippet pre"))


def test_greedy_draws_one_sample_at_temperature_0(page: Browser) -> None:
    page.fill("problem", "12+34=")
    page.click("#greedy")
    until(lambda: page.run("return document.querySelectorAll('article:not(.live)').length") == 1)
    assert page.run("return [document.getElementById('temperature').value, document.getElementById('n').value]") == [
        "0",
        "1",
    ]


def test_nothing_of_a_tile_is_clipped(page: Browser) -> None:
    page.fill("max_tokens", "4000")
    _sample(page, 32)
    clipped = """return [...document.querySelectorAll('.length')].filter((e) => {
      const [own, card] = [e.getBoundingClientRect(), e.closest('article').getBoundingClientRect()];
      return own.right > card.right + 1 || own.bottom > card.bottom + 1; }).length"""
    assert page.run(clipped) == 0


def test_a_refusal_of_the_server_is_shown(page: Browser) -> None:
    page.fill("problem", "π=")
    page.click("#go")
    until(lambda: "does not know the character" in page.text("#error"))
    assert page.text("#error").startswith("Problem: ")  # and not messages.0.content
    page.fill("problem", "1+1=")
    page.fill("max_tokens", "5000")
    page.click("#go")
    until(lambda: page.text("#error").startswith("Length: 5000 after a prompt of"))
    assert page.text("#go") == "Sample"


def test_what_is_shown_is_never_markup(page: Browser) -> None:
    """Model output, answers and errors that are HTML stay text; nothing runs."""
    evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    page.run(
        "const s = newSample(0, true); state.samples = [s]; at('samples').append(s.card); at('result').hidden = false;"
        "s.content = '<think>' + arguments[0] + '</think><answer>' + arguments[0]; s.finish = 'stop'; showText(s);"
        "showScore(s, {value: 0, advantage: null, correct: false, extracted: arguments[0],"
        " rewards: {[arguments[0]]: {value: 0, status: arguments[0]}}}, null, 0); showKinds(); fail(arguments[0])",
        evil,
    )
    shown = page.run("return document.querySelector('main').textContent")
    assert shown.count(evil) >= 5  # text, extracted answer, reward, kind, error
    assert page.count("img, article script") == 0
    assert page.run("return window.hit ?? null") is None


def test_an_exchange_is_shown_turn_by_turn(page: Browser) -> None:
    """A call gets its result, the answer its reward, and whoever goes on gets another answer."""
    page.run(
        "const real = fetch; window.bodies = []; window.fetch = (path, options) => {"
        "const body = options && JSON.parse(options.body); if (options) bodies.push(body);"
        "if (body?.tools?.length && body.messages.length === 1) Object.assign(body, {tool_choice: 'required',"
        " parallel_tool_calls: false, max_tokens: 200});"
        "return real(path, body ? {...options, body: JSON.stringify(body)} : options) }"
    )  # random weights call nothing by themselves
    page.run("document.getElementById('tools').value = arguments[0]", json.dumps([CALC]))
    page.fill("n", "2")
    page.click("#go")
    until(lambda: "called tools" in page.text("#group"))
    assert page.text("article .call") == 'calc({"expression": "12*7"})'
    assert page.count("article.right, article.wrong") == 0
    page.run("document.querySelector('article .reply input').value = '<b>84</b>'")
    page.click("article .reply button")
    until(lambda: page.count("article.right, article.wrong") == 1)
    assert page.texts(".turn .who") == ["Policy", "calc"]
    assert page.texts(".turn .text")[1] == "<b>84</b>"
    _, said, result = page.run("return bodies.filter(b => b.messages?.length === 3)[0].messages")
    assert result["tool_call_id"] == said["tool_calls"][0]["id"] and result["content"] == "<b>84</b>"
    until(lambda: page.count("article .reply") == 2)
    page.run("document.querySelector('article .reply input').value = 'Sure?'")
    page.click("article .reply button")
    until(lambda: page.count(".turn") == 4)
    until(lambda: page.count(".live") == 0)
    assert page.texts(".turn .who")[3] == "You"
    assert page.count("article.right, article.wrong") == 0
    assert page.count("article .text b") == 0
    assert page.run("return document.getElementById('error').hidden") is True


def test_tools_that_are_no_json_are_named(page: Browser) -> None:
    page.run("document.getElementById('tools').value = '[{'")
    page.click("#go")
    until(lambda: page.text("#error").startswith("Tools: "))
    assert page.text("#go") == "Sample"


def test_sixty_four_samples_fit_a_screen(page: Browser) -> None:
    page.show_at(1280, 1000)
    _say(page, *[r"\boxed{46}"] * 64)
    _sample(page, 64)
    lowest = "return Math.max(...[...document.querySelectorAll('article')].map(a => a.getBoundingClientRect().bottom))"
    assert page.run(lowest) <= 1000
    assert page.texts("article .said") == ["46"] * 64
    page.click("article:nth-of-type(3) .head")
    assert page.count("article.open") == 1 and "boxed" in page.text("article.open .text")
    page.click("#view")
    assert page.count("article.open") == 64 and page.text("#view") == "Show tiles"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_any_screen(page: Browser, scheme: str) -> None:
    page.show_at(1280, scheme=scheme)
    assert page.low_contrasts() == []
    _say(page, r"\boxed{46}", r"<think>long</think>\boxed{47}", "x" * 300)
    _sample(page, 8)
    page.open_details()
    page.run("fail('something')")
    for width in (1280, 390, 360):
        page.show_at(width, scheme=scheme)
        assert page.low_contrasts() == []
        assert page.overflow() <= 0
        assert page.nameless() == []


def test_the_keyboard_is_enough(page: Browser) -> None:
    """From the problem to an opened sample, without a pointer."""
    page.run("document.getElementById('problem').focus()")
    page.press(*["Tab"] * 7)  # the answer, and five settings
    assert page.run("return document.activeElement.id") == "go"
    page.run("document.getElementById('n').value = 17")
    page.press("Enter")
    until(lambda: "tokens" in page.text("#group"))
    page.run("document.getElementById('view').focus()")
    page.press("Tab")
    assert page.run("return document.activeElement.closest('article')?.getAttribute('aria-label')") == "sample 1"
    page.press("Enter")
    assert page.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
    assert page.count("article.open") == 1


def test_it_asks_for_nothing_from_outside(page: Browser, server: Any) -> None:
    loaded = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == [f"{server.address}/v1/models"]
    headers = server.call("GET", "/")[2]
    assert headers["content-security-policy"].startswith("default-src 'none'")
