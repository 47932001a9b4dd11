"""The site's own steps on pages."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")
markdown = pytest.importorskip("markdown")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formulas_become_mathml_without_a_script(hooks: Any) -> None:
    options = {"pymdownx.arithmatex": {"generic": True}}
    page = "The ratio $r<1$, `$HOME` as it is.\n\n$$\n\\frac{a}{b}\n$$\n"
    html = markdown.markdown(page, extensions=list(options), extension_configs=options)
    shown = hooks.on_page_content(html)
    assert 'display="inline"><mrow><mi>r</mi><mo>&#x0003C;</mo><mn>1</mn></mrow></math>' in shown
    assert 'display="block"><mrow><mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac></mrow></math>' in shown
    assert "<code>$HOME</code>" in shown and "arithmatex" not in shown
