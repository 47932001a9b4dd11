"""Blocks of code on the pages, as files, modules and scripts that tests run."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.forked import run_script

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """The text of a page of ``docs``."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(text: str, language: str, begin: str = "") -> list[str]:
    """The code blocks of a text in a language whose first line is ``begin``, without it."""
    first = f"{re.escape(begin)}\n" if begin else ""
    return re.findall(rf"^```{language}\n{first}(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def changed(code: str, changes: dict[str, str]) -> str:
    """Code in which each text, which stands there once, is another."""
    for before, after in changes.items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


def as_module(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a module into a folder from which it can be imported, whatever had its name before."""
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name.partition(".")[0], raising=False)


def loaded(file: Path) -> ModuleType:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str, folder: Path, cache: Path | None = None) -> str:
    """What a script in a folder printed, which must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPO_PL_CACHE": str(cache or folder / "cache")}
    status, said = run_script(script, *arguments, env=environment, cwd=folder)
    assert status == 0, said
    return said
