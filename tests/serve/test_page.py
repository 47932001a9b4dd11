"""The page in a real headless Chromium, driven through its DevTools protocol by ChromeDriver."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
]
needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is missing: apt-get install chromium chromium-driver",
)
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


class Browser:
    """A page in Chromium, spoken to in plain WebDriver."""

    def __init__(self, profile: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_for_driver()
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, *flags, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._session = "/session/" + self._send("POST", "/session", {"capabilities": capabilities})["sessionId"]

    def open(self, address: str) -> None:
        self._send("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._send("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """What the script hands to its last argument."""
        return self._send("POST", f"{self._session}/execute/async", {"script": script, "args": list(arguments)})

    def fill(self, field: str, value: str) -> None:
        """Types into a field, key by key."""
        self.run("document.getElementById(arguments[0]).value = ''", field)
        element = self._find(f"#{field}")
        self._send("POST", f"{self._session}/element/{element}/value", {"text": value})

    def click(self, selector: str) -> None:
        self._send("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def console(self) -> list[str]:
        entries = self._send("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        try:
            self._send("DELETE", self._session, None)
        finally:
            self._driver.kill()
            self._driver.wait()

    def _find(self, selector: str) -> str:
        found = self._send("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                if self._send("GET", "/status", None)["ready"]:
                    return
            except OSError:
                assert time.monotonic() < end, "chromedriver did not start"
            time.sleep(0.1)

    def _send(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_a_problem_is_typed_streams_in_and_gets_its_rewards(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    until(lambda: "tiny" in browser.text("#model"))
    browser.fill("problem", "12+34=")
    browser.fill("answer", "46")
    browser.fill("n", "5")
    browser.run(
        "const read = eventsOf; window.pieces = 0; eventsOf = async function* (response) {"
        "for await (const event of read(response)) { pieces += event.choices[0].delta.content ? 1 : 0; yield event; } }"
    )
    browser.click("#go")
    until(lambda: "Mean reward" in browser.text("#group"))
    assert browser.run("return document.querySelectorAll('article').length") == 5
    assert browser.run("return document.querySelectorAll('article.right, article.wrong').length") == 5
    assert browser.run("return pieces") > 5 + 1  # the prefill of each, and what was drawn in more than one piece
    assert browser.text("article .think")
    assert "Advantage" in browser.text("article dl")
    assert "math" in browser.text("article .detail")
    advantages = browser.run("return [...document.querySelectorAll('dl div:nth-child(2) dd')].map(d => d.textContent)")
    numbers = [float(a.replace("−", "-").replace("+", "")) for a in advantages]
    assert sum(numbers) == pytest.approx(0.0, abs=0.01)
    assert "Std" in browser.text("#group")
    assert browser.run("return document.getElementById('error').hidden") is True
    assert browser.console() == []


def test_without_an_answer_there_are_completions_and_no_rewards(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    browser.fill("answer", " ")
    browser.fill("n", "2")
    browser.click("#go")
    until(lambda: "Samples" in browser.text("#group"))
    assert browser.run("return document.querySelectorAll('article').length") == 2
    assert browser.run("return document.querySelectorAll('dl').length") == 0


def test_what_could_not_be_judged_is_neither_right_nor_wrong(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    browser.fill("problem", "12+34=")
    browser.fill("answer", r"\frac{")  # no gold answer can be read from this
    browser.fill("n", "4")
    browser.run(
        "const read = eventsOf; eventsOf = async function* (response) { for await (const event of read(response)) {"
        "for (const c of event.choices) if (c.delta.role && c.index) c.delta.content = '\\\\boxed{46}';"
        "yield event; } }"
    )  # all but the first have an answer
    browser.click("#go")
    until(lambda: "Could not be judged" in browser.text("#group"))
    assert browser.run("return document.querySelectorAll('article.unjudged').length") == 4
    assert browser.run("return document.querySelectorAll('article.right, article.wrong').length") == 0
    shown = browser.text("#group")
    assert "4 of 4" in shown
    assert "Right" not in shown
    assert "could not be judged: bad gold" in browser.text("article .detail")


def test_an_answer_goes_with_its_problem(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    value = "return document.getElementById('answer').value"
    assert browser.run(value) != ""
    browser.fill("problem", "2+2=")
    assert browser.run(value) == ""
    browser.fill("answer", "4")
    browser.fill("n", "2")
    browser.run(
        "const read = eventsOf; eventsOf = async function* (response) { yield* read(response);"
        "document.getElementById('answer').value = 'typed meanwhile' }"
    )
    browser.run(
        "const real = fetch; window.fetch = (path, options) => {"
        "if (path === '/v1/score') window.scored = JSON.parse(options.body); return real(path, options) }"
    )
    browser.click("#go")
    until(lambda: "Problem" in browser.text("#group"))
    assert browser.run("return scored.items.map(item => item.answer)") == ["4", "4"]
    assert "2+2=" in browser.text("#group")


def test_a_refusal_of_the_server_is_shown(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    browser.fill("problem", "π=")
    browser.click("#go")
    until(lambda: "does not know the character" in browser.text("#error"))
    assert browser.text("#go") == "Sample"


def test_what_is_shown_is_never_markup(server: Any, browser: Browser) -> None:
    """Model output, answers and errors that are HTML stay text; nothing runs."""
    evil = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    browser.open(server.address + "/")
    browser.run(
        "const s = newCard(0); s.content = '<think>' + arguments[0] + '</think><answer>' + arguments[0]; showText(s);"
        "showScore(s, {value: 0, advantage: null, correct: false, extracted: arguments[0],"
        " rewards: {[arguments[0]]: {value: 0, status: arguments[0]}}}); fail(arguments[0])",
        evil,
    )
    shown = browser.run("return document.querySelector('main').textContent")
    assert shown.count(evil) >= 4  # text, extracted answer, reward, error
    assert browser.run("return document.querySelectorAll('img, article script').length") == 0
    assert browser.run("return window.hit ?? null") is None


def test_an_exchange_is_shown_turn_by_turn(server: Any, browser: Browser) -> None:
    """A call gets its result, the answer its reward, and whoever goes on gets another answer."""
    browser.open(server.address + "/")
    browser.run(
        "const real = fetch; window.bodies = []; window.fetch = (path, options) => {"
        "const body = options && JSON.parse(options.body); if (options) bodies.push(body);"
        "if (body?.tools?.length && body.messages.length === 1) Object.assign(body, {tool_choice: 'required',"
        " parallel_tool_calls: false, max_tokens: 200});"
        "return real(path, body ? {...options, body: JSON.stringify(body)} : options) }"
    )  # random weights call nothing by themselves
    browser.run("document.getElementById('tools').value = arguments[0]", json.dumps([CALC]))
    browser.fill("n", "2")
    browser.click("#go")
    until(lambda: "Called tools" in browser.text("#group"))
    assert browser.text("article .call") == 'calc({"expression": "12*7"})'
    assert browser.run("return document.querySelectorAll('article.right, article.wrong').length") == 0
    browser.run("document.querySelector('article .reply input').value = '<b>84</b>'")
    browser.click("article .reply button")
    until(lambda: browser.run("return document.querySelectorAll('article.right, article.wrong').length") == 1)
    assert browser.run("return [...document.querySelectorAll('.turn .who')].map(w => w.textContent)") == [
        "Policy",
        "calc",
    ]
    assert browser.run("return document.querySelectorAll('.turn .text')[1].textContent") == "<b>84</b>"
    _, said, result = browser.run("return bodies.filter(b => b.messages?.length === 3)[0].messages")
    assert result["tool_call_id"] == said["tool_calls"][0]["id"] and result["content"] == "<b>84</b>"
    browser.run("document.querySelector('article .reply input').value = 'Sure?'")
    browser.click("article .reply button")
    until(lambda: browser.run("return document.querySelectorAll('.turn').length") == 4)
    until(lambda: browser.run("return document.querySelectorAll('.live').length") == 0)
    assert browser.run("return document.querySelectorAll('.turn .who')[3].textContent") == "You"
    assert browser.run("return document.querySelectorAll('article.right, article.wrong').length") == 0
    assert browser.run("return document.querySelectorAll('article b').length") == 0
    assert browser.run("return document.getElementById('error').hidden") is True


def test_tools_that_are_no_json_are_named(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    browser.run("document.getElementById('tools').value = '[{'")
    browser.click("#go")
    until(lambda: browser.text("#error").startswith("Tools: "))
    assert browser.text("#go") == "Sample"


def test_it_fits_a_phone(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    browser.run(
        "const frame = document.createElement('iframe'); frame.id = 'phone'; frame.width = 360; frame.height = 700;"
        "frame.srcdoc = document.documentElement.outerHTML.replace(/<script>[^]*<\\/script>/, '');"
        "document.body.append(frame)"
    )
    width = "const d = document.getElementById('phone').contentDocument; return d?.body?.scrollWidth ?? 0"
    until(lambda: browser.run(width) > 0)
    assert browser.run(width) <= 360


def test_it_asks_for_nothing_from_outside(server: Any, browser: Browser) -> None:
    browser.open(server.address + "/")
    until(lambda: "tiny" in browser.text("#model"))
    loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == [f"{server.address}/v1/models"]
    headers = server.call("GET", "/")[2]
    assert headers["content-security-policy"].startswith("default-src 'none'")
