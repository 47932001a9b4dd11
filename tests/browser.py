"""A real headless Chromium in plain WebDriver, and what every page is held to: contrast, width, names, keyboard."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1280,1800"),
]
needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")) and not os.environ.get("CI"),  # which must have it
    reason="Chromium is missing: apt-get install chromium chromium-driver",
)
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Left": "\ue012", "Right": "\ue014", "Space": " "}

CONTRASTS = """
const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
const light = (color) => color.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const canvas = parse(getComputedStyle(document.body).backgroundColor);
const behind = (node) => {
  const found = [];
  for (let at = node; at instanceof Element; at = at.parentElement) {
    const own = parse(getComputedStyle(at).backgroundColor);
    if (own.length === 3 || own[3] > 0) { found.push(own); if (own.length === 3 || own[3] === 1) break; }
  }
  return found.reverse().reduce((under, own) => over(own, under), canvas);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const holder = node.parentElement;
  const shown = holder.checkVisibility({opacityProperty: true, visibilityProperty: true});
  if (!node.textContent.trim() || !shown || holder.closest('script, style, option')) continue;
  const style = getComputedStyle(holder), back = behind(holder);
  const ink = over(parse(holder instanceof SVGElement ? style.fill : style.color), back);
  const [a, b] = [light(ink), light(back)], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio >= 4.5) continue;
  low.push(`${ratio.toFixed(2)}: ${holder.tagName}.${holder.className} ${node.textContent.trim().slice(0, 40)}`);
}
return low;
"""
"""Texts with a contrast below 4.5 to 1 (WCAG 2.2, success criterion 1.4.3; luminance as defined there)."""


class Browser:
    """A page in Chromium."""

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

    def press(self, *keys: str) -> None:
        """Presses keys of `KEYS` or characters one after the other, wherever the focus is."""
        steps = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "k", "actions": steps}]})

    def open_details(self, selector: str = "details") -> None:
        """Opens them and waits for their `toggle`, which comes later and is when the pages fill them."""
        self.wait_for(
            "const [selector, done] = arguments;"
            "const closed = [...document.querySelectorAll(selector)].filter(d => !d.open);"
            "const opened = closed.map(d => new Promise(r => d.addEventListener('toggle', r, {once: true})));"
            "closed.forEach(d => { d.open = true }); Promise.all(opened).then(() => done())",
            selector,
        )

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return list(self.run(script, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def console(self) -> list[str]:
        entries = self._send("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._send("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def show_at(self, width: int, height: int = 1000, *, scheme: str = "light") -> None:
        """As on a screen of this size whose user likes it light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(shot))

    def low_contrasts(self) -> list[str]:
        return list(self.run(CONTRASTS))

    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return int(self.run("const d = document.documentElement; return d.scrollWidth - d.clientWidth"))

    def nameless(self) -> list[str]:
        """Roles in the accessibility tree that can be worked with or looked at, and have no name."""
        told = ("button", "slider", "textbox", "link", "combobox", "spinbutton", "checkbox", "image", "region", "table")
        nodes = self.devtools("Accessibility.getFullAXTree")["nodes"]
        shown = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
        return [role for role, name in shown if role in told and not name]

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
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as refused:  # a script that fails is answered with 500 and its message
            raise AssertionError(json.loads(refused.read())["value"]["message"]) from refused


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
