"""Who may import whom: read from the source by ``ast``, and seen in a fresh process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_pl

PACKAGE = Path(grpo_pl.__file__).parent
LIGHTNING = {"lightning", "pytorch_lightning"}
LAYER_1 = {"grpo_pl.types", "grpo_pl.functional"}


def _imports(file: Path, *, type_checking: bool = True) -> Iterator[str]:
    """Every module that a file imports, at the top or inside functions."""
    tree = ast.parse(file.read_text())
    skipped = set()
    if not type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            # `from package import name` may import a module or a name of one
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]


def _within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def _ours(file: Path, *, type_checking: bool = True) -> list[str]:
    return [n for n in _imports(file, type_checking=type_checking) if _within(n, {"grpo_pl"})]


@pytest.mark.parametrize("room", ["types", "functional"])
def test_the_lowest_layer_needs_torch_and_nothing_else(room: str) -> None:
    for file in _files(room):
        for name in _imports(file):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names | {"torch"} or _within(name, LAYER_1), f"{file} imports {name}"


def test_rewards_lean_on_no_other_room() -> None:
    for file in _files("rewards"):
        for name in _ours(file):
            assert _within(name, {"grpo_pl.rewards", "grpo_pl.functional.exact_sums"}), f"{file} imports {name}"


@pytest.mark.parametrize("room", ["data", "policy", "rollout", "metrics", "rewards", "functional", "types"])
def test_only_the_data_module_of_the_lower_rooms_imports_lightning(room: str) -> None:
    users = {f for f in _files(room) for name in _imports(f) if name.split(".")[0] in LIGHTNING}
    assert users <= {PACKAGE / "data" / "datamodule.py"}


@pytest.mark.parametrize("room", ["data", "policy", "rollout", "metrics"])
def test_the_second_layer_never_reaches_up(room: str) -> None:
    above = {f"grpo_pl.{name}" for name in ("algorithm", "module", "callbacks", "strategies", "cli", "commands")}
    above |= {f"grpo_pl.{name}" for name in ("experience", "collection", "update", "export", "loggers", "runs")}
    for file in _files(room):
        for name in _ours(file):
            assert not _within(name, above), f"{file} imports {name}"


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.name in ("cli.py", "__main__.py") or "commands" in file.parts:
            continue
        for name in _ours(file):
            assert not _within(name, {"grpo_pl.cli.main", "grpo_pl.cli.commands"}), f"{file} imports {name}"


def _loaded_after(statement: str, *modules: str) -> set[str]:
    code = f"import sys; {statement}; print(*[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_functional_brings_torch_and_none_of_the_frameworks() -> None:
    files = [f"grpo_pl.functional.{file.stem}" for file in _files("functional") if file.stem != "__init__"]
    loaded = _loaded_after(f"import {', '.join(files)}", "torch", "lightning", "transformers", "litserve")
    assert loaded == {"torch"}


def test_importing_what_rewards_share_with_the_objective_brings_no_torch() -> None:
    assert not _loaded_after("import grpo_pl.functional.exact_sums, grpo_pl.rewards.batch", "torch")


def test_importing_the_package_brings_nothing_heavy() -> None:
    assert not _loaded_after("import grpo_pl", "torch", "lightning", "transformers", "litserve")


def test_no_module_is_named_like_one_of_the_libraries() -> None:
    taken = sys.stdlib_module_names | {"torch", "transformers", "lightning", "datasets", "rich", "safetensors", "peft"}
    ours = {file.stem for file in PACKAGE.rglob("*.py") if not file.stem.startswith("__")}
    assert ours & taken <= {"types"}  # the glossary's own name; nothing is started by path beside it
