"""``report.html``: whole, self-contained, and safe whatever the policy wrote; opened in a real browser where there is
one (Debian: ``apt-get install chromium chromium-driver``)."""

import base64
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.runs import RunFolder
from grpo_pl.report.page import build_page, write_report

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{data}}\u2028"


def _row(step: int, prompt: int, sample: int, completion: str, value: float) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": prompt,
        "sample": sample,
        "prompt": f"What is {prompt}+{prompt}?",
        "question": f"{prompt}+{prompt}",
        "answer": str(2 * prompt),
        "completion": completion,
        "tokens": 5,
        "finish_reason": "stop",
        "rewards": {"math": {"value": value, "status": "ok" if value else "wrong", "detail": HOSTILE}},
        "correct": value == 1.0,
        "reward": value,
        "advantage": value - 0.5,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "<b>demo")
    folder.path.mkdir()
    lines = ["step,val/pass@1,val/greedy,reward,kl,time/rollout,time/update,step_time", "0,0.1,0.2,,,,,"]
    lines += [f"{s},,,{s / 40},{0.01 * s},{1.0},{0.5},1.5" for s in range(1, 31)] + ["30,0.7,0.9,,,,,"]
    folder.metrics.write_text("\n".join(lines) + "\n")
    rows = [
        _row(step, prompt, sample, HOSTILE if sample else f"<think>s{step}p{prompt}</think>\\boxed{{4}}", 1.0 - sample)
        for step in (0, 10, 20)
        for prompt in (1, 2)
        for sample in (0, 1)
    ]
    folder.completions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.config.write_text("name: </pre><script>document.title='owned'</script>\n")
    write_report(folder)
    return folder


def test_the_page_needs_nothing_from_outside(run: RunFolder) -> None:
    page = run.report.read_text()
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\"\s]+", without_data)) == {"http://www.w3.org/2000/svg"}  # a name, not a page


def test_what_the_policy_wrote_cannot_end_the_element_it_stands_in(run: RunFolder) -> None:
    page = run.report.read_text()
    assert page.count("</script>") == 2 and "onerror=" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data and "<" not in data[1]
    assert json.loads(data[1])["samples"][0]["groups"][0]["completions"][1]["completion"] == HOSTILE
    assert "<title>&lt;b&gt;demo" in page


def test_a_long_file_of_completions_is_thinned_out_evenly(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.report.page.LARGEST_SAMPLES", 900)
    data = re.search(r'id="data">(.*?)</script>', build_page(run), re.DOTALL)
    assert data and [rollout["step"] for rollout in json.loads(data[1])["samples"]] == [1, 21]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no metrics\.csv"):
        write_report(RunFolder(tmp_path))


# --- in a browser ---------------------------------------------------------------------------------------------------

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1280,1800"),
)


class Browser:
    """Chromium by WebDriver's own protocol: JSON over HTTP."""

    def __init__(self, port: int, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}/session"
        options = {
            "args": [*FLAGS, f"--user-data-dir={profile}"],
            "binary": shutil.which("chromium"),
        }
        capabilities = {
            "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}},
        }
        self.session = self.call("", {"capabilities": capabilities})["sessionId"]

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        place = f"{self.base}/{self.session}/{path}" if path else self.base
        request = urllib.request.Request(place, data=None if body is None else json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.call("execute/sync", {"script": script, "args": []})

    def texts(self, selector: str) -> list[str]:
        return list(self.run(f"return [...document.querySelectorAll({selector!r})].map(e => e.textContent)"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        opened = Browser(port, tmp_path_factory.mktemp("profile"))
        yield opened
        urllib.request.urlopen(urllib.request.Request(f"{opened.base}/{opened.session}", method="DELETE")).close()
    finally:
        driver.terminate()
        driver.wait()


@pytest.fixture
def page(browser: Browser, run: RunFolder) -> Browser:
    browser.call("url", {"url": run.report.as_uri()})
    return browser


def test_the_browser_draws_every_chart_and_runs_nothing_that_was_written(page: Browser, tmp_path: Path) -> None:
    assert page.texts("#charts h3") == ["Held-out problems", "Reward", "KL to the reference", "Time per rollout"]
    assert page.run(
        "return [...document.querySelectorAll('svg')].map(s => s.querySelectorAll('.curve, .area').length)"
    ) == [*(2, 1, 1, 2)]
    broken = "return document.querySelectorAll('path[d*=NaN], [cx=NaN], text[x=NaN]').length"
    assert page.run(broken) == 0
    assert page.run("return document.title") == "<b>demo – grpo-pl"
    assert page.run("return document.querySelectorAll('img, body script:not(#data)').length") == 1  # the page's own
    assert HOSTILE in page.texts(".completion .text")
    assert page.texts("h1") == ["<b>demo"]
    assert [entry for entry in page.call("se/log", {"type": "browser"}) if entry["level"] == "SEVERE"] == []
    assert base64.b64decode(page.call("screenshot"))[:4] == b"\x89PNG"


def test_one_stalled_rollout_does_not_press_the_others_flat(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [f"{step},{100.0 if step == 7 else 1.0},0.5" for step in range(1, 31)]
    folder.metrics.write_text("\n".join(["step,time/rollout,time/backward", *rows]) + "\n")
    browser.call("url", {"url": write_report(folder).as_uri()})
    marks = [float(text) for text in browser.texts("svg text[text-anchor=end]")]
    assert 1.5 < max(marks) <= 3.5
    browser.run(
        "const svg = document.querySelector('svg'), box = svg.getBoundingClientRect();"
        "const at = 46 + (6 / 29) * (svg.clientWidth - 56);"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + at, clientY: box.top + 50}))"
    )
    assert browser.texts(".tooltip") == ["rollout 7rollout100backward0.500"]  # the number stays the measured one


def test_the_browser_of_samples_walks_through_rollouts_prompts_and_verdicts(page: Browser) -> None:
    assert page.texts("#rollout-label") == ["rollout 21"]  # the last
    page.run("document.getElementById('previous').click()")
    assert page.texts("#rollout-label") == ["rollout 11"]
    assert "<think>s10p1</think>\\boxed{4}" in page.texts(".completion .text")
    page.run("document.querySelectorAll('#groups button')[1].click()")
    assert page.texts("#groups button") == ["prompt 1: 1/2", "prompt 2: 1/2"]
    assert page.texts("#problem .gold b") == ["4"]
    page.run("document.querySelectorAll('#filters button')[2].click()")
    assert page.texts("#filters button") == ["all 2", "correct 1", "wrong 1"]
    assert page.texts(".completion .text") == [HOSTILE]
    page.run("const s = document.getElementById('rollout'); s.value = 0; s.dispatchEvent(new Event('input'))")
    assert page.texts("#rollout-label") == ["rollout 1"]


def _turn(action: str, observation: Any, reward: float, advantage: float, **more: Any) -> dict[str, Any]:
    turn = {"action": action, "observation": observation, "reward": reward, "advantage": advantage}
    return {**turn, "invalid_action": False, "finish_reason": "stop", **more}


def test_episodes_are_shown_turn_by_turn(browser: Browser, tmp_path: Path) -> None:
    won = [
        _turn("right", "S@FF\nFFFG", 0.0, 0.25),
        _turn(HOSTILE, [{"role": "tool", "content": "<b>84"}], 0.5, -0.5, invalid_action=True, finish_reason="length"),
        _turn("down", "", 1.0, 0.75),
    ]
    episode = {"return": 1.5, "status": "ok", "detail": "", "finish_reason": "environment", "observation": "@FFF\nFFFG"}
    lost = {**episode, "return": None, "status": "timeout", "detail": "30 s", "turns": won[:1]}
    rows = [_row(0, 1, 0, "down", 1.0), {**_row(0, 1, 1, "right", 0.0), "finish_reason": "turns"}]
    rows[0]["episode"], rows[1]["episode"] = {**episode, "turns": won}, lost
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("step,reward\n1,0.5\n2,0.6\n")
    folder.completions.write_text("".join(json.dumps({**row, "answer": ""}) + "\n" for row in rows))
    browser.call("url", {"url": write_report(folder).as_uri()})
    assert browser.texts(".completion:first-child .exchange li > .text") == ["right", HOSTILE, "down"]
    assert browser.texts(".completion:first-child .observation") == ["S@FF\nFFFG", "tool: <b>84"]
    facts = ["advantage+0.25", "reward 0.5advantage-0.50invalid actioncut off", "reward 1advantage+0.75"]
    assert browser.texts(".completion:first-child li .facts") == facts
    assert browser.texts(".completion .length") == ["3 turns, 5 tokens", "1 turn, 5 tokens, out of turns"]
    assert "environment: timeout" in browser.texts(".completion:last-child .chip")
    assert browser.texts("#problem .gold") == []  # nothing to compare with
    assert browser.run("return document.title") == f"{tmp_path.name} – grpo-pl"


def test_pointing_at_a_chart_shows_the_numbers_of_that_rollout(page: Browser) -> None:
    page.run(
        "const svg = document.querySelectorAll('svg')[1], box = svg.getBoundingClientRect();"
        "const at = {clientX: box.left + box.width - 11, clientY: box.top + 50};"
        "svg.dispatchEvent(new PointerEvent('pointermove', at))"
    )
    assert page.texts(".tooltip") == ["rollout 30reward0.750"]
    assert page.run("return document.querySelectorAll('.cursor').length") == 4  # in all charts at once
    page.run("document.querySelectorAll('svg')[1].dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.texts(".tooltip") == []
