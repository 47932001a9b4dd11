"""Counts the lines of ours that a process has loaded, in the core and in extras, and the imports between the two."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import parser_of, publish, surroundings
from runs import CONFIGS

ROOT = CONFIGS.parent
QUICKSTART = (
    *("fit", f"--config={CONFIGS / 'quickstart.yaml'}", "--data.steps=2", "--trainer.val_check_interval=2"),
    *("--data.prompts_per_step=4", "--data.val_prompts=4", "--model.cold_start.steps=2", "--runs_dir=runs"),
)
SCORE = ("score", "answers.jsonl", "--config=rewards.yaml")
REWARDS = {"rewards": [{"class_path": "grpo_pl.rewards.MathReward"}]}
ANSWERS = [{"completion": r"\boxed{4}", "answer": "4"}]
HEAVY = ("torch", "lightning", "transformers")
PROCESSES = {
    "quickstart": f"from grpo_pl.cli.main import main; assert main({list(QUICKSTART)!r}) == 0",
    "GRPOModule": "from grpo_pl import GRPOModule",
    "score": f"from grpo_pl.cli.main import main; assert main({list(SCORE)!r}) == 0",
}
"""Name -> what the main process does."""
TOLD = """
import json, sys
found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
with open("loaded", "w") as file:
    json.dump(found, file)
"""


def loaded(statement: str) -> dict[str, str | None]:
    """Modules that a fresh process has loaded after a statement, with their files."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
        Path(folder, "rewards.yaml").write_text(json.dumps(REWARDS))
        environment = {**os.environ, "GRPO_PL_CACHE": str(Path(folder, "cache"))}
        command = [sys.executable, "-c", f"{statement}\n{TOLD}"]
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        found: dict[str, str | None] = json.loads(Path(folder, "loaded").read_text())
    return found


def is_extra(module: str) -> bool:
    return module.split(".")[:2] == ["grpo_pl", "extras"]


def lines_of(modules: dict[str, str | None]) -> dict[str, int]:
    """Module of ours -> its lines."""
    ours = {name: Path(file) for name, file in modules.items() if name.split(".")[0] == "grpo_pl" and file}
    return {name: file.read_text(encoding="utf-8").count("\n") for name, file in ours.items() if file.suffix == ".py"}


def counted(modules: dict[str, str | None]) -> dict[str, Any]:
    """Modules and lines of ours, in the core and in extras; and which heavy libraries are there."""
    lines = lines_of(modules)
    core, extras = ({n: count for n, count in lines.items() if is_extra(n) is wanted} for wanted in (False, True))
    return {
        "core": {"modules": len(core), "lines": sum(core.values())},
        "extras": {"modules": len(extras), "lines": sum(extras.values())},
        "heavy": [library for library in HEAVY if library in modules],
    }


def edges() -> dict[str, list[str]]:
    """Imports of extras in the core, by whether they are at the top of a file, in a function, or for type checkers."""
    found: dict[str, list[str]] = {"top": [], "function": [], "types": []}
    for file in sorted((ROOT / "grpo_pl").rglob("*.py")):
        path = file.relative_to(ROOT)
        if path.parts[1] != "extras":
            _collect(ast.parse(file.read_text(encoding="utf-8")), "top", str(path), found)
    return found


def _collect(node: ast.AST, kind: str, path: str, found: dict[str, list[str]]) -> None:
    for inner in ast.iter_child_nodes(node):
        inside = kind
        if isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.unparse(inner.test):
            inside = "types"
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "top":
            inside = "function"
        modules = [alias.name for alias in inner.names] if isinstance(inner, ast.Import) else []
        if isinstance(inner, ast.ImportFrom):
            modules = [f"{inner.module}.{alias.name}" for alias in inner.names]
        found[inside] += [f"{path}: {module}" for module in modules if is_extra(module)]
        _collect(inner, inside, path, found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--modules", action="store_true", help="print each module of ours with its lines")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "closure", **surroundings("cpu")}
    for name, statement in PROCESSES.items():
        modules = loaded(statement)
        record[name] = counted(modules)
        print(name, record[name], flush=True)
        if arguments.modules:
            print(*(f"{lines:6} {module}" for module, lines in sorted(lines_of(modules).items())), sep="\n")
    record["edges"] = edges()
    print({kind: len(found) for kind, found in record["edges"].items()})
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
