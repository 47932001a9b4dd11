"""The site's own steps: pages from the top of the repository, links to files outside ``docs``, formulas as MathML."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
TOP["CHANGELOG.md"] = "changelog.md"
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README and its siblings as pages, with their links turned round."""
    for source, page in TOP.items():
        text = _LINK.sub(_from_top, (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, files: Files, config: MkDocsConfig, **_: Any) -> str:
    """Files outside ``docs`` that a page links to become part of the site, below ``files/``."""
    return _LINK.sub(lambda link: _outside(link[1], files, config), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas, which arithmatex has marked, become MathML: browsers show it without a script."""
    return _FORMULA.sub(lambda found: _mathml(html.unescape(found[3]), block=found[2] == "["), content)


def _mathml(formula: str, *, block: bool) -> str:
    shown = latex2mathml.converter.convert(formula.strip(), display="block" if block else "inline")
    return f'<div class="formula">{shown}</div>' if block else shown


def _from_top(link: re.Match[str]) -> str:
    path = link[1].removeprefix("./")
    if path in TOP:
        return TOP[path]
    inside = path.removeprefix("docs/")
    return inside if inside != path or ":" in path else f"../{path}"


def _outside(path: str, files: Files, config: MkDocsConfig) -> str:
    if not path.startswith("../") or ":" in path:
        return path
    inner = path.removeprefix("../")
    target = ROOT / inner
    if inner in TOP or not target.exists():
        return TOP.get(inner, path)
    if target.is_dir():
        return path
    uri = f"files/{inner}" + (".txt" if target.suffix in (".py", ".md") else "")
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, content=target.read_bytes()))
    return uri
