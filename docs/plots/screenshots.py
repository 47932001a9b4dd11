"""Pictures of the served page, the report and the site's front page, in Chromium, on two screens, light and dark.

After the main job and ``mkdocs build``, with ``grpo-pl serve --model runs/quickstart/export`` running::

    python docs/plots/screenshots.py --server http://127.0.0.1:8000 --report runs/quickstart/report.html --site site

Writes ``docs/images/serve.png``, ``serve-dark.png``, ``serve-phone.png``, ``serve-phone-dark.png``, ``serve-64.png``,
and the first four likewise for ``report`` and ``site``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.browser import Browser, until  # noqa: E402 - a path that is not installed

SCREENS = {"": (1280, 900), "-phone": (390, 1500)}
"""Ending of a picture's name -> width and height in pixels."""


def sampled(
    browser: Browser, address: str, problem: str, answer: str, seed: int, temperature: float, n: int = 8
) -> None:
    """Opens the server's page and waits for a judged group."""
    browser.open(address)
    until(lambda: browser.text("#model"))
    for field, value in {
        "problem": problem,
        "answer": answer,
        "seed": str(seed),
        "temperature": str(temperature),
        "n": str(n),
    }.items():
        browser.fill(field, value)
    browser.click("#go")
    until(lambda: "tokens" in browser.text("#group"))
    browser.run("document.activeElement.blur()")


def anew(browser: Browser, address: str) -> None:
    """Opens the site without what it stored at an earlier visit: the scheme of that one."""
    browser.open(address)
    browser.run("localStorage.clear()")
    browser.open(address)


def save(browser: Browser, name: str, folder: Path) -> None:
    """The screen as a picture with few colours, which is a third as large."""
    time.sleep(0.3)  # until charts are drawn again after a change of width
    file = folder / f"{name}.png"
    browser.picture(file, whole=False)
    Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="address of a running server")
    parser.add_argument("--report", type=Path, help="report.html of a run")
    parser.add_argument("--site", type=Path, help="folder of the built site")
    parser.add_argument("--problem", default="347+285=")
    parser.add_argument("--answer", default="632")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--temperature", type=float, default=1.3, help="so that some samples are wrong")
    parser.add_argument("--name", default="serve", help="beginning of the names of the server's pictures")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    pages: dict[str, Callable[[Browser], None]] = {}
    if given.server:
        asked = (given.server, given.problem, given.answer, given.seed, given.temperature)
        pages[given.name] = lambda b: sampled(b, *asked)
    if given.report:
        pages["report"] = lambda b: b.open(given.report.resolve().as_uri())
    if given.site:
        pages["site"] = lambda b: anew(b, (given.site / "index.html").resolve().as_uri())
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile), "--hide-scrollbars")
        for scheme in ("light", "dark"):
            for ending, (width, height) in SCREENS.items():
                browser.show_at(width, height, scheme=scheme)
                for name, show in pages.items():
                    show(browser)
                    save(browser, f"{name}{ending}{'-dark' * (scheme == 'dark')}", given.output)
        if given.server:
            browser.show_at(1280, 1000)
            sampled(browser, *asked, n=64)
            save(browser, f"{given.name}-64", given.output)
        browser.close()


if __name__ == "__main__":
    main()
