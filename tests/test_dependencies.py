"""What the code imports is what pyproject.toml declares, with the bounds that private parts need."""

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"grpo_pl", "serve"}
LOADED_BY_OTHERS = {
    "tensorboard": "Lightning's TensorBoardLogger",
}
"""Declared, though no line of ours imports it -> what does."""


@cache
def _providers() -> Mapping[str, list[str]]:
    """Module -> the distributions that bring it; reads the records of all that are installed."""
    return packages_distributions()


def _declared(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@cache
def _imported(folder: str) -> dict[str, set[str]]:
    """Distribution -> the files that import it, at the top, inside functions or for type checkers."""
    providers = _providers()
    found: dict[str, set[str]] = {}
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for module in {name.partition(".")[0] for name in named} - sys.stdlib_module_names - OWN:
                name = providers.get(module, [module])[0]
                found.setdefault(canonicalize_name(name), set()).add(str(file.relative_to(ROOT)))
    return found


EXTRA_OF = {
    "grpo_pl/extras/scaffold/kinds.py": "environments",
    "grpo_pl/extras/agents/calculator_agent.py": "judge",
    "grpo_pl/extras/agents/gymnasium_ids.py": "environments",
    "grpo_pl/extras/agents/inspect_tasks.py": "inspect",
    **{f"grpo_pl/extras/kernels/{name}.py": "triton" for name in ("decoding", "gated", "head", "race")},
    "grpo_pl/extras/agents/textarena_games.py": "environments",
    "grpo_pl/extras/agents/verifiers_tasksets.py": "verifiers",
    "grpo_pl/extras/judges/endpoint.py": "judge",
    "grpo_pl/data/tasks/shapes.py": "images",
    "grpo_pl/extras/images/picture.py": "images",
    "grpo_pl/extras/judges/judge.py": "judge",
    "grpo_pl/extras/judges/rubric.py": "judge",
    "grpo_pl/extras/engines/copy_engine.py": "lora",
    "grpo_pl/extras/engines/native_child.py": "lora",
    "grpo_pl/policy/lora.py": "lora",
    "grpo_pl/policy/quantization.py": "qlora",
    "grpo_pl/data/tasks/gsm_templates.py": "gsm",
    "grpo_pl/data/tasks/reasoning_gym.py": "reasoning-gym",
    "grpo_pl/rewards/sandbox/gym_entry.py": "reasoning-gym",
    "grpo_pl/rewards/sandbox/gym_guards.py": "reasoning-gym",
    "grpo_pl/rewards/sandbox/gym_judge.py": "reasoning-gym",
    "grpo_pl/extras/engines/ray/cluster.py": "ray",
    "grpo_pl/extras/engines/ray/pool.py": "ray",
    "grpo_pl/extras/engines/vllm/keyed_draws.py": "vllm",
    "grpo_pl/extras/engines/vllm/worker.py": "vllm",
    "grpo_pl/rollout/grammars.py": "structured",
}
"""The files that may import what an extra brings, each inside a function or behind a message that names the extra."""


@pytest.mark.parametrize("folder", sorted(OWN))
def test_every_import_is_declared(folder: str) -> None:
    always, imported = _declared(), _imported(folder)
    assert imported
    for name, files in imported.items():
        for file in files:
            extras = [EXTRA_OF[file]] if file in EXTRA_OF else []
            assert name in always or name in _declared(*extras), f"{file} imports {name}, which is not declared"


def test_every_declared_package_is_used() -> None:
    used = {name for folder in OWN for name in _imported(folder)}
    assert _declared(*set(EXTRA_OF.values())).keys() == used | LOADED_BY_OTHERS.keys()
    assert not used & LOADED_BY_OTHERS.keys()


def test_every_declared_package_has_a_lower_bound() -> None:
    declared = _declared(*set(EXTRA_OF.values())).values()
    assert declared
    for requirement in declared:
        operators = {bound.operator for bound in requirement.specifier}
        assert operators & {">=", "=="}, f"{requirement} has no lower bound"


def test_tests_and_benchmarks_import_what_dev_brings() -> None:
    extras = [name for name in PROJECT["optional-dependencies"] if name != "docs"]
    declared = _declared(*extras).keys()
    folders = ("tests", "benchmarks")
    local = {canonicalize_name(file.stem) for folder in folders for file in (ROOT / folder).rglob("*.py")} | {"tests"}
    installed = {canonicalize_name(name) for names in _providers().values() for name in names}
    for folder in folders:
        for name, files in _imported(folder).items():
            ours = name in local or name not in installed  # such as a module that a test writes and imports
            assert name in declared or ours, f"{sorted(files)} import {name}"


def test_each_line_says_what_the_package_is_for_and_what_holds_it_back() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")].splitlines()[1:-2]
    assert len(listed) == len(PROJECT["dependencies"]) <= 28
    for line in listed:
        package, _, purpose = line.partition("  # ")
        held_back = "<" in package.split('"')[1]
        assert purpose and (not held_back or ";" in purpose), f"{package.strip()}: say its use, and what holds it back"


# --- private parts ----------------------------------------------------------------------------------------------------


def _table() -> dict[str, set[str]]:
    """File -> the distributions whose private parts CONTRIBUTING.md says it knows."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(r"^## Private parts of libraries\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([\w/.]+)` \| ([^|]+) \|", section, re.MULTILINE)
    return {file: {canonicalize_name(name.strip()) for name in names.split(",")} for file, names in rows}


def _files() -> list[Path]:
    return sorted(file for folder in OWN for file in (ROOT / folder).rglob("*.py"))


def _private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def _names(file: Path) -> tuple[set[str], set[str], set[str]]:
    """Names that a file defines or sets, private ones that it imports from libraries, and private ones that it reads
    of other objects."""
    defined: set[str] = set()
    imported: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in OWN:
            imported.update(node.module.split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            imported.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            key = node.args[1]
            if isinstance(key, ast.Constant):
                used.add(key.value)
    return defined, set(filter(_private, imported)), set(filter(_private, used))


def test_private_parts_of_libraries_are_known_in_the_files_that_say_so() -> None:
    names, table = {str(file.relative_to(ROOT)): _names(file) for file in _files()}, _table()
    own = set().union(*(defined for defined, _, _ in names.values()))
    own |= {"_exit", "_replace"}  # of `os` and of named tuples, which are documented
    foreign = {file: (imported - {"_exit"}) | (used - own) for file, (_, imported, used) in names.items()}
    outside = {file: found for file, found in foreign.items() if found and file not in table}
    assert not outside, "list these files in CONTRIBUTING.md, or move what they do into those listed"
    assert all((ROOT / file).is_file() for file in table)


def test_a_library_whose_private_parts_are_known_has_an_upper_bound() -> None:
    declared = _declared(*PROJECT["optional-dependencies"])
    for file, names in _table().items():
        for name in names:
            operators = {bound.operator for bound in declared[name].specifier}
            assert operators & {"<", "<=", "==", "~="}, f"{file} knows private parts of {name}, which is not bounded"
