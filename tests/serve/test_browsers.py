"""A real Chromium: the way in with a key, and what a page of another origin tries in vain."""

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser import Browser, needs_browser, until

pytestmark = needs_browser
KEY = "secret-3"

ATTACKS = """
const [address, done] = [arguments[0], arguments[arguments.length - 1]];
const body = JSON.stringify({items: [{problem: "1+1=", answer: "2"}], messages: [{role: "user", content: "1+1="}],
  n: 1, max_tokens: 2, prompt: "1+1="});
const tries = {
  read: () => fetch(address + "/v1/models").then((r) => r.text()),
  cookies: () => fetch(address + "/v1/models", {credentials: "include"}).then((r) => r.text()),
  blind: () => fetch(address + "/v1/models", {mode: "no-cors", credentials: "include"}).then((r) => r.status),
  json: () => fetch(address + "/v1/evaluate", {method: "POST", body, credentials: "include",
    headers: {"Content-Type": "application/json"}}).then((r) => r.text()),
  plain: () => fetch(address + "/v1/evaluate", {method: "POST", body, mode: "no-cors", credentials: "include",
    headers: {"Content-Type": "text/plain"}}).then((r) => r.status),
  beacon: async () => navigator.sendBeacon(address + "/v1/chat/completions", new Blob([body], {type: "text/plain"})),
  xhr: () => new Promise((yes, no) => { const x = new XMLHttpRequest(); x.open("POST", address + "/v1/completions");
    x.onload = () => yes(x.responseText); x.onerror = () => no(new Error("refused")); x.send(body); }),
  script: () => new Promise((yes, no) => { const s = document.createElement("script"); s.src = address + "/metrics";
    s.onload = () => yes("ran"); s.onerror = () => no(new Error("refused")); document.head.append(s); }),
  form: () => new Promise((yes) => {
    const [f, i] = [document.createElement("form"), document.createElement("input")];
    const frame = document.createElement("iframe"); frame.name = "target"; document.body.append(frame);
    f.method = "POST"; f.action = address + "/v1/score"; f.enctype = "text/plain"; f.target = "target";
    i.name = body.slice(0, -1) + ', "x": "'; i.value = '"}'; f.append(i); document.body.append(f);
    frame.onload = () => yes("sent"); f.submit(); }),
};
(async () => {
  const found = {};
  for (const [name, attack] of Object.entries(tries)) {
    try { found[name] = String(await attack()); } catch (error) { found[name] = "refused"; }
  }
  done(found);
})();
"""
FRAMED = """
const frame = document.createElement("iframe");
frame.src = arguments[0] + "/";
frame.onload = () => arguments[1]();
document.body.append(frame);
"""


@pytest.fixture(scope="module")
def foreign() -> Iterator[int]:
    """The port of somebody else's web site on this machine."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>evil</title><body>evil</body>")

        def log_message(self, *args: Any) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site.server_address[1]
    site.shutdown()
    thread.join()
    site.server_close()


@pytest.fixture(scope="module")
def locked(start: Callable[..., Any], foreign: int) -> Any:
    """A server with a key, which lets in the pages of one other origin and has a further name."""
    friend = f"http://friend.example:{foreign}"
    return start("--cors-origin", friend, "--allowed-host", "model.example", api_key=KEY)


def _open(browser: Browser, server: Any) -> None:
    """With the key as the password that a browser would ask its user for, and send from then on."""
    browser.open(server.address.replace("http://", f"http://me:{KEY}@") + "/")
    browser.open(server.address + "/")
    until(lambda: "tiny" in browser.text("#model"))


def test_a_person_with_the_key_opens_the_page_and_uses_it(locked: Any, browser: Browser) -> None:
    _open(browser, locked)
    browser.fill("problem", "12+34=")
    browser.fill("n", "2")
    browser.click("#go")
    until(lambda: browser.run("return document.querySelectorAll('article:not(.live)').length") == 2)
    assert browser.run("return document.getElementById('error').hidden") is True
    assert "secret" not in browser.run("return document.documentElement.outerHTML")


@pytest.mark.parametrize("site", ["evil.example", "127.0.0.1", "localhost"])
@pytest.mark.parametrize("which", ["server", "locked"])
def test_a_page_of_another_origin_gets_nothing_done(
    request: pytest.FixtureRequest, browser: Browser, foreign: int, which: str, site: str
) -> None:
    """Another site, and other ports of the server's own names, to which browsers may send its password."""
    target = request.getfixturevalue(which)
    if which == "locked":
        _open(browser, target)
    drawn, scored = (target.metric(name) for name in ("generated_tokens_total", "reward_statuses_total"))
    browser.open(f"http://{site}:{foreign}/")
    found = browser.wait_for(ATTACKS, target.address)
    blind = {"blind": "0", "plain": "0", "beacon": "true", "form": "sent"}  # what a page hears of what it cannot read
    assert {name: found[name] for name in found if found[name] not in ("refused", blind.get(name))} == {}
    assert len(found) == 9
    browser.console()
    browser.wait_for(FRAMED, target.address)
    assert any("frame-ancestors 'none'" in line for line in browser.console())
    assert target.metric("generated_tokens_total") == drawn
    assert target.metric("reward_statuses_total") == scored
    assert target.is_idle()


def test_a_name_that_is_made_to_point_here_is_refused(server: Any, browser: Browser) -> None:
    """DNS rebinding: to the browser this is one origin with the server."""
    browser.open(f"http://rebound.example:{server.port}/")
    assert "Invalid host" in browser.text("body")
    script = "const done = arguments[0]; fetch('/v1/models').then((r) => r.status).then(done, () => done('blocked'));"
    assert browser.wait_for(script) in (400, "blocked")


def test_a_page_that_is_let_in_can_chat(locked: Any, browser: Browser, foreign: int) -> None:
    browser.open(f"http://friend.example:{foreign}/")
    script = (
        "const done = arguments[2]; fetch(arguments[0] + '/v1/chat/completions', {method: 'POST', headers: "
        "{'Content-Type': 'application/json', Authorization: 'Bearer ' + arguments[1]}, body: JSON.stringify("
        "{messages: [{role: 'user', content: '1+1='}], max_tokens: 2})})"
        ".then((r) => r.json()).then((r) => done(r.object), (e) => done('' + e));"
    )
    assert browser.wait_for(script, f"http://model.example:{locked.port}", KEY) == "chat.completion"
    browser.open(f"http://evil.example:{foreign}/")
    assert browser.wait_for(script, f"http://model.example:{locked.port}", KEY) != "chat.completion"
