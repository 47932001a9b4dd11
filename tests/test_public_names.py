"""``import grpo_pl``: what it shows, and what it costs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_pl
from grpo_pl.moved import defined_name

PACKAGE = Path(grpo_pl.__file__)
ROOT = PACKAGE.parents[1]


def _printed(code: str) -> str:
    """By a new process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_names_are_shown_without_loading_what_is_behind_them() -> None:
    code = "import sys, grpo_pl; print(len(grpo_pl.__all__), *(m for m in sys.modules if m.startswith('grpo_pl')))"
    code += "; print(*({'torch', 'lightning', 'transformers', 'yaml'} & sys.modules.keys()))"
    ours, others = _printed(code).splitlines()
    number, *loaded = ours.split()
    assert int(number) == len(grpo_pl.__all__)
    assert set(loaded) == {"grpo_pl"}
    assert not others


def test_every_name_is_there_and_explains_itself() -> None:
    for name in grpo_pl.__all__:
        value = getattr(grpo_pl, name)
        assert inspect.getdoc(value) and name in dir(grpo_pl), name
        if not inspect.ismodule(value):
            assert value.__name__ == name
            assert value.__module__ == grpo_pl.DEFINED_IN[name]  # not from somewhere else that imports it, too
            assert defined_name(f"grpo_pl.{name}") == f"{value.__module__}.{name}"  # as configurations compare


def test_type_checkers_see_the_same_names() -> None:
    (block,) = [node for node in ast.parse(PACKAGE.read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert seen.keys() == set(grpo_pl.__all__)
    assert all(seen[name] == defined_name(f"grpo_pl.{name}") for name in seen)


def test_the_page_lists_all_of_them() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    (table,) = re.findall(r"^## All names\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == grpo_pl.__all__


def test_tensor_mathematics_is_shown_as_well_and_costs_nothing_before_it_is_asked_for() -> None:
    package = ROOT / "grpo_pl/functional/__init__.py"
    (block,) = [node for node in ast.parse(package.read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen.keys() == set(grpo_pl.functional.__all__) <= set(dir(grpo_pl.functional))
    for name, module in seen.items():
        value = getattr(grpo_pl.functional, name)
        assert value.__module__ == module and inspect.getdoc(value), name
    code = "import sys, grpo_pl.functional; print(*({'torch', 'lightning', 'transformers'} & sys.modules.keys()))"
    assert _printed(code) == "\n"
    with pytest.raises(AttributeError, match="no attribute 'grpo_loss'"):
        grpo_pl.functional.grpo_loss  # noqa: B018


def test_rewards_are_shown_before_they_are_asked_for() -> None:
    code = "import sys, grpo_pl.rewards as r; print({*r.__all__} <= {*dir(r)}, 'grpo_pl.rewards.base' in sys.modules)"
    assert _printed(code) == "True False\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'"):
        grpo_pl.GRPOTrainer  # noqa: B018
