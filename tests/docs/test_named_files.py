"""Files, modules and messages that the pages name are there, and the reference shows each module once."""

import re
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name

from packaging.version import Version

ROOT = Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PLACES = (ROOT, ROOT / "grpo_pl", ROOT / "docs")
ENDINGS = "py|md|sh|json|jsonl|csv|yaml|html"


def test_every_file_that_a_page_names_is_there() -> None:
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # which tells of what is no more
            continue
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))  # what readers make themselves
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        named = set(re.findall(rf"(?<=[` ])((?:[\w.-]+/)+[\w.-]+\.(?:{ENDINGS}))(?=[` ])", prose))
        for name in named - set(re.findall(r"[\w./-]+", blocks)):
            if not name.startswith(("runs/", "my_package/", "rollout-")):
                assert any((place / name).exists() for place in PLACES), f"{page.name} names {name}"
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}, which is no file"


def test_every_module_that_a_page_names_is_there() -> None:
    pages = {page for page in PAGES + REFERENCE if page.name != "CHANGELOG.md"}  # which tells of what is no more
    named = {name for page in pages for name in re.findall(r"\bgrpo_pl(?:\.[a-z_]+)+", page.read_text())}
    for name in named - {"grpo_pl.json"}:
        resolve_name(name)  # else there is none of this name


def test_the_reference_shows_each_module_once() -> None:
    shown = Counter(name for page in REFERENCE for name in re.findall(r"^::: (.*)", page.read_text(), re.MULTILINE))
    assert shown and [name for name, times in shown.items() if times > 1] == []


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "(.*)"',
        "grpo_pl/__init__.py": r'^__version__ = "(.*)"',
        "CITATION.cff": r"^version: (.*)",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    found = {file: re.findall(p, (ROOT / file).read_text(), re.MULTILINE)[0] for file, p in places.items()}
    code, released = Version(found["pyproject.toml"]), Version(found["CITATION.cff"])
    assert found["grpo_pl/__init__.py"] == str(code) and found["CHANGELOG.md"] == str(released)
    assert code == released or (code.dev is not None and code > released)  # between two releases
    (date,) = re.findall(r"^date-released: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {released} - {date}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_on_serving_names_the_versions_of_clients_that_are_tested() -> None:
    (table,) = re.findall(r"^\| client \|.*?\n\n", (ROOT / "docs/serving.md").read_text(), re.MULTILINE | re.DOTALL)
    tested = re.findall(r"\w(?:==|@)(\d+\.\d+\.\d+)", (ROOT / ".ci/clients").read_text().replace("torch==", ""))
    assert set(tested) == set(re.findall(r"\b\d+\.\d+\.\d+\b", table))


def test_the_page_on_data_names_every_source() -> None:
    code = "\n".join(file.read_text() for file in (ROOT / "grpo_pl" / "data").rglob("*.py"))
    sources = set(re.findall(r"^class (\w+Prompts)\(", code, re.MULTILINE)) - {
        "GeneratedPrompts",
        "RowPrompts",
        "SearchPrompts",
    }
    table = (ROOT / "docs" / "data.md").read_text().split("\n## ")[0]
    assert len(sources) >= 9
    assert {name for name in sources if f".{name}`" not in table} == set()


def test_every_message_on_the_page_of_troubleshooting_is_one_of_the_code() -> None:
    files = [path for folder in ("grpo_pl", "serve") for path in sorted((ROOT / folder).rglob("*.py"))]
    # adjacent literals are one text
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files)
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## What was tried")[0]
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) >= 15
    for message in (found for row in rows for found in re.findall("`([^`]+)`", row.split("|")[1])):
        for part in re.split(r"\s*…\s*", message):
            assert part.strip(". ") in code, message
