"""Who may import whom: every import of the package and the server, from the source and in fresh processes."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import grpo_pl

ROOT = Path(grpo_pl.__file__).parents[1]
PACKAGE = ROOT / "grpo_pl"
LOWEST = {"types", "moved", "functional", "files", "processes", "openai_format", "rewards", "environment"}
MIDDLE = {"config", "objective", "data", "policy", "rollout", "evaluation"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "functional": {"types"},
    "moved": set(),
    "files": {"moved"},
    "processes": set(),
    "openai_format": set(),
    "rewards": {"moved", "files", "functional", "processes"},
    "environment": {"rewards", "functional"},
    "config": {"objective", *LOWEST},
    "objective": {"types", "functional"},
    "data": LOWEST,
    "policy": {"config", *LOWEST},
    "rollout": {"types", "functional", "policy", "environment", "processes"},
    "evaluation": {"policy", "rollout", "data", *LOWEST},
    "distributed": LOWEST | MIDDLE,
    "training": {"distributed", *LOWEST, *MIDDLE},
    "callbacks": {"training", "distributed", *LOWEST, *MIDDLE},
    "cli": {"callbacks", "training", "distributed", *LOWEST, *MIDDLE},
    "extras": {"cli", "callbacks", "training", "distributed", *LOWEST, *MIDDLE},
    "serve": {"extras", *LOWEST, *MIDDLE},
}
"""Room -> the rooms that it may import. Only a run's configuration, verbs and default callbacks lead to ``extras``."""
REACHED = {
    "grpo_pl/functional/accelerated.py": {"grpo_pl.extras.kernels.gated.SiluProduct"},  # to see whether Triton compiles
    "grpo_pl/data/tasks/shapes.py": {
        "grpo_pl.extras.images.permuted.with_images_of_others",
        "grpo_pl.extras.images.picture.Picture",  # which a run on text does without
        "grpo_pl.extras.images.picture.pillow",
    },
    "grpo_pl/data/rows.py": {"grpo_pl.extras.images.row_images.read_images"},  # for data.source.images
    "grpo_pl/cli/commands/score.py": {"grpo_pl.extras.images.row_images.row_with_images"},  # for --images
    "grpo_pl/cli/commands/evaluate.py": {"grpo_pl.extras.images.row_images.row_with_images"},  # policies with images
    "grpo_pl/cli/answering.py": {"grpo_pl.extras.agents.pool.EnvironmentPool"},  # for an export's environment
    "grpo_pl/policy/loading.py": {  # for model.policy.images
        "grpo_pl.extras.images.models.give_reader",
        "grpo_pl.extras.images.models.placeholder_tokens",
        "grpo_pl.extras.images.models.prepare_model",
    },
    "grpo_pl/policy/trained.py": {"grpo_pl.extras.agents.tool_form.ToolForm"},
    "grpo_pl/rollout/sampler.py": {"grpo_pl.extras.agents.episodes.run_episodes"},
    "grpo_pl/training/stage.py": {"grpo_pl.extras.agents.pool.EnvironmentPool"},
    "grpo_pl/training/policy_module.py": {"grpo_pl.extras.agents.pool.EnvironmentPool"},  # for model.environment
    "grpo_pl/training/frozen_models.py": {"grpo_pl.extras.teachers.server.served_logprobs"},
    "grpo_pl/training/source_choice.py": {
        "grpo_pl.extras.engines.partial.PartialRolloutBuffer",  # for model.partial_rollouts
        "grpo_pl.extras.engines.prefetched.PrefetchedRollouts",  # for data.staleness
    },
}
"""Imports of extras in functions of the core: for fields of a configuration that are no class paths, and in
the registry of accelerated functions, the only core file that names kernels."""
HEAVY = ("torch", "lightning", "transformers", "litserve", "fastapi", "starlette")


def _files(room: str) -> list[Path]:
    folder = ROOT / "serve" if room == "serve" else PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_every_import_of_extras_that_is_allowed_is_there_in_a_function() -> None:
    for file, modules in REACHED.items():
        top = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ImportFrom)]
        assert modules <= _imports(ROOT / file, types_too=False), file
        assert not modules & {f"{node.module}.{alias.name}" for node in top for alias in node.names}, file


@cache
def _imports(file: Path, *, types_too: bool = True) -> set[str]:
    """Every module that a file imports: at the top, inside functions, or (``types_too``) for type checkers only."""
    found: set[str] = set()
    tree = ast.parse(file.read_text())
    if not types_too:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            # `from package import name` may import a module or a name of one
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _extras_for_type_checkers(file: Path) -> set[str]:
    return {module for module in _imports(file) - _imports(file, types_too=False) if _room(module) == "extras"}


def _room(module: str) -> str | None:
    top, _, rest = module.partition(".")
    if top == "serve":
        return "serve"
    return rest.partition(".")[0] if top == "grpo_pl" and rest else None


def _rooms() -> set[str]:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return {room for room in found if not room.startswith("__")} | {"serve"}


def test_every_room_has_its_line_in_the_table() -> None:
    assert _rooms() == MAY_IMPORT.keys()
    assert len(_rooms() - {"serve"}) <= 19


def _table() -> dict[str, set[str]]:
    """What the last column of the table in CONTRIBUTING.md allows each room; ``extras`` is allowed everything."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d? ?\| `(\w+)(?:/|\.py)` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    highest = {"distributed", "training", "callbacks"}
    groups = {"layer 1": LOWEST, "layers 1–2": LOWEST | MIDDLE, "layers 1–3": LOWEST | MIDDLE | highest}
    groups["everything"] = {*groups["layers 1–3"], "cli"}
    table: dict[str, set[str]] = {}
    for room, allowed in rows:
        names = set(re.findall(r"`(\w+)`", allowed))
        table[room] = names.union(*(rooms for words, rooms in groups.items() if re.search(rf"{words}\b", allowed)))
    return table


def test_the_table_of_contributing_allows_the_same() -> None:
    assert _table() == MAY_IMPORT


def _wrong_imports(root: Path) -> list[str]:
    """Imports that the table does not allow, in every file of the package and the server below ``root``."""
    wrong = []
    for file in sorted([*root.glob("grpo_pl/**/*.py"), *root.glob("serve/**/*.py")]):
        path = file.relative_to(root)
        if path.name == "__main__.py":
            continue  # both are the command line
        room = "serve" if path.parts[0] == "serve" else path.parts[1].removesuffix(".py")
        if path.name == "__init__.py" and len(path.parts) <= 3:  # whose names for type checkers are public
            allowed, modules = {room} - {"__init__"}, _imports(file, types_too=False)
        else:
            names = {"__version__", "DEFINED_IN"}
            of_server = {"serve"} if room == "cli" else set()  # of which two verbs are
            allowed, modules = {room, *names, *of_server, *MAY_IMPORT[room]}, _imports(file)
        modules = modules - _extras_for_type_checkers(file) - REACHED.get(str(path), set())
        wrong += [f"{path}: {module}" for module in modules if _room(module) not in {None, *allowed}]
    return wrong


def test_a_room_imports_those_below_it_only() -> None:
    assert _wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        (
            "grpo_pl/rollout/sampler.py",
            "from grpo_pl.training.module import GRPOModule",
            "grpo_pl.training.module.GRPOModule",
        ),
        ("grpo_pl/policy/lora.py", "def f():\n    import grpo_pl.rollout.engine", "grpo_pl.rollout.engine"),
        ("grpo_pl/extras/report/page.py", "import serve.server", "serve.server"),
        ("grpo_pl/types.py", "from grpo_pl.functional import kl", "grpo_pl.functional.kl"),
        ("serve/server.py", "from grpo_pl.cli.main import main", "grpo_pl.cli.main.main"),
        (
            "grpo_pl/callbacks/summary.py",
            "from grpo_pl.extras.watch.callback import RewardWatch",
            "grpo_pl.extras.watch.callback.RewardWatch",
        ),
        (
            "grpo_pl/training/module.py",
            "def f():\n    import grpo_pl.extras.plan.workload",
            "grpo_pl.extras.plan.workload",
        ),
        ("grpo_pl/cli/trainer.py", "from grpo_pl.extras.doctor import rules", "grpo_pl.extras.doctor.rules"),
        ("grpo_pl/__init__.py", "from grpo_pl.types import Problem", "grpo_pl.types.Problem"),
    ],
)
def test_an_import_of_a_higher_room_is_found(tmp_path: Path, file: str, line: str, wrong: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"import os\n{line}\n")
    assert _wrong_imports(tmp_path) == [f"{file}: {wrong}"]


def test_only_the_server_may_import_extras() -> None:
    assert [room for room, allowed in MAY_IMPORT.items() if "extras" in allowed] == ["serve"]


def test_the_table_has_no_circle() -> None:
    left = dict(MAY_IMPORT)
    while left:
        free = [room for room, below in left.items() if not below & left.keys()]
        assert free, f"rooms import each other in a circle: {sorted(left)}"
        for room in free:
            del left[room]


def test_no_two_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    files = {path for room in _rooms() for path in _files(room)}
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    for module, file in modules.items():
        read = _imports(file) - _extras_for_type_checkers(file)
        named = {name if name in modules else name.rpartition(".")[0] for name in read}
        graph[module] = {name for name in named if name in modules and name != module}
    while graph:
        free = [module for module, below in graph.items() if not below & graph.keys()]
        assert free, f"files import each other in a circle, among {sorted(graph)}"
        for module in free:
            del graph[module]


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("types", {"torch"}),
        ("functional", {"torch"}),
        ("files", {"torch", "yaml", "pyarrow", "filelock", "huggingface_hub"}),
        ("processes", set()),
        ("openai_format", {"pydantic", "pydantic_core"}),
    ],
)
def test_the_lowest_rooms_need_few_libraries(room: str, allowed: set[str]) -> None:
    for file in _files(room):
        libraries = {module.partition(".")[0] for module in _imports(file)} - sys.stdlib_module_names - {"grpo_pl"}
        assert libraries <= allowed, file


def test_only_the_data_module_of_the_lower_rooms_imports_lightning() -> None:
    files = [file for room in MIDDLE | LOWEST for file in _files(room)]
    users = {f for f in files for name in _imports(f) if name.split(".")[0] in ("lightning", "pytorch_lightning")}
    assert users == {PACKAGE / "data" / "datamodule.py"}


def _walks() -> list[list[str]]:
    """The numbered walks of CONTRIBUTING.md, as modules in their order."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    steps = re.findall(r"^(\d+)\. `((?:grpo_pl|serve)/[\w/]+)\.py`", page, re.MULTILINE)
    walks: list[list[str]] = []
    for number, path in steps:
        if number == "1":
            walks.append([])
        assert len(walks[-1]) == int(number) - 1
        walks[-1].append(path.replace("/", "."))
    return walks


def test_the_ways_of_a_prompt_a_reward_and_a_chat_are_as_short_as_they_are_written_down() -> None:
    prompt, reward, chat = _walks()
    assert len(prompt) <= 15 and len(reward) <= 6 and len(chat) <= 12
    for walk in (prompt, reward, chat):
        for number, module in enumerate(walk[1:], start=1):
            assert any(_leans_on(other, module) or _leans_on(module, other) for other in walk[:number]), module


def _leans_on(module: str, other: str) -> bool:
    """Whether a module imports another, or from the package that shows what the other holds."""
    named = list(_imports(ROOT / f"{module.replace('.', '/')}.py"))
    package = other.rpartition(".")[0]
    return any(name.startswith(f"{other}.") or name.rpartition(".")[0] == package for name in named)


def _loaded_after(statement: str, libraries: Sequence[str] = HEAVY) -> set[str]:
    code = f"import sys; {statement}; print(*[m for m in {libraries!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_functional_brings_torch_and_none_of_the_frameworks() -> None:
    files = [
        f"grpo_pl.functional.{file.stem}" for file in (PACKAGE / "functional").glob("*.py") if file.stem != "__init__"
    ]
    assert _loaded_after(f"import {', '.join(files)}") == {"torch"}


@pytest.mark.parametrize(
    "statement",
    ["import grpo_pl", "from grpo_pl.rewards import *", "import grpo_pl.files", "import grpo_pl.config.objects"],
)
def test_importing_what_everything_needs_brings_nothing_heavy(statement: str) -> None:
    assert not _loaded_after(statement, (*HEAVY, "sympy", "openai"))


def test_scoring_loads_neither_torch_nor_a_framework() -> None:
    assert not _loaded_after("import grpo_pl.cli.commands.score")


@pytest.mark.parametrize(
    "verb", ["evaluate", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("predict", "filter"))]
)
def test_a_verb_without_a_server_loads_no_web_framework(verb: str) -> None:
    assert not _loaded_after(f"import grpo_pl.cli.commands.{verb}") & {"litserve", "fastapi", "starlette"}


def test_no_module_is_named_like_one_of_the_libraries() -> None:
    taken = sys.stdlib_module_names | {"torch", "transformers", "lightning", "datasets", "rich", "safetensors", "peft"}
    ours = {file.stem for file in PACKAGE.rglob("*.py") if not file.stem.startswith("__")}
    assert ours & taken <= {"types"}  # the glossary's own name; nothing is started by path beside it
