"""The site's own steps on pages, and its front page in a browser, built without mkdocstrings, which takes long."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, needs_browser, until
from tests.docs.pages import ROOT, loaded

mkdocs_build = pytest.importorskip("mkdocs.commands.build")
mkdocs_config = pytest.importorskip("mkdocs.config")
pytest.importorskip("latex2mathml")
markdown = pytest.importorskip("markdown")


def test_formulas_become_mathml_without_a_script() -> None:
    options = {"pymdownx.arithmatex": {"generic": True}}
    page = "The ratio $r<1$, `$HOME` as it is.\n\n$$\n\\frac{a}{b}\n$$\n"
    html = markdown.markdown(page, extensions=list(options), extension_configs=options)
    shown = loaded(ROOT / "docs" / "site" / "hooks.py").on_page_content(html)
    assert 'display="inline"><mrow><mi>r</mi><mo>&#x0003C;</mo><mn>1</mn></mrow></math>' in shown
    assert 'display="block"><mrow><mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac></mrow></math>' in shown
    assert "<code>$HOME</code>" in shown and "arithmatex" not in shown


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Folder and address of a site with some of the pages."""
    folder = tmp_path_factory.mktemp("site")
    kept = "*.md\nreference/\nsite/*.py\nplots/*.py\nplots/*.csv\n!index.md\n!scaling.md\n!distillation.md\n!data.md\n"
    changed = {"site_dir": str(folder), "strict": False, "plugins": ["search"], "nav": None, "exclude_docs": kept}
    mkdocs_build.build(mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), **changed))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@needs_browser
@pytest.mark.parametrize(("page", "scheme"), [("", "light"), ("distillation/", "dark"), ("data/", "light")])
def test_a_page_can_be_read_and_asks_for_nothing_from_outside(
    site: tuple[Path, str], browser: Browser, page: str, scheme: str
) -> None:
    """The front page, one with formulas, one with code."""
    browser.show_at(1280, scheme=scheme)
    browser.open(site[1] + page)
    browser.run("localStorage.clear()")  # where the page keeps the scheme of the visit before
    browser.open(site[1] + page)
    assert browser.run("return document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
    for width in (1280, 390):
        browser.show_at(width, scheme=scheme)
        assert browser.low_contrasts() == []
        assert browser.overflow() <= 0
    loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded and [name for name in loaded if not name.startswith((site[1], "data:"))] == []
    assert browser.console() == []


@needs_browser
def test_a_search_for_resume_finds_the_page(site: tuple[Path, str], browser: Browser) -> None:
    browser.show_at(1280)
    browser.open(site[1])
    browser.run("document.querySelector('.md-search__input').focus()")
    browser.press(*"resume")
    until(lambda: any("scaling" in text.lower() for text in browser.texts(".md-search-result__item")))
