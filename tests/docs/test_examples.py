"""The scripts and the notebook of examples/ run, made shorter; others are tested with the pages that show them."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, changed, page, run

SHORTER = {
    "training.py": {"steps=250": "steps=20", "steps=12": "steps=2", "val_prompts=50": "val_prompts=8"},
    "reward.py": {"steps=60": "steps=2"},
    "environment.py": {"steps=150": "steps=2"},
    "agent.py": {
        "steps=40": "steps=1",
        "step=16": "step=2",
        "val_prompts=32": "val_prompts=2",
        "group_size=8": "group_size=2",
    },
}
"""What stands there, and what is run in its place."""


@pytest.mark.parametrize(
    "name", [pytest.param("training.py", marks=pytest.mark.slow), "reward.py", "environment.py", "agent.py"]
)
def test_an_example_runs_and_says_where_its_completions_are(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(changed((ROOT / "examples" / name).read_text(), SHORTER[name]))
    said = run(name, folder=tmp_path)
    assert "shards" not in said and "weights_only" not in said  # what libraries say and nobody can act on
    place = re.findall(r"(?: is| are) in (\S+)$", said, re.MULTILINE)[-1]
    assert (tmp_path / place).exists()


def test_the_notebook_runs_and_shows_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((ROOT / "examples/quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    *code, shown = ("".join(cell["source"]) for cell in cells)
    shorter = {"steps=400": "steps=5", "steps=120": "steps=2", "val_prompts=100": "val_prompts=4"}
    small = '"--data.steps=2", "--model.cold_start.steps=5", "--data.prompts_per_step=4", "--data.val_prompts=2"'
    shorter['"--data.steps=8", "--data.val_prompts=8"'] = small
    (tmp_path / "notebook.py").write_text(changed("\n".join([*code, f"print({shown})"]), shorter))
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert "'model.safetensors'" in run("notebook.py", folder=tmp_path).splitlines()[-1]


def test_every_example_is_tested() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == SHORTER.keys() | {"cli.py", "fabric.py", "server.py"}


def test_the_server_is_that_of_the_page() -> None:
    assert (ROOT / "examples/server.py").read_text() in page("serving")


def test_the_training_is_that_of_the_page() -> None:
    _, code = (ROOT / "examples/training.py").read_text().split("\n\n", 1)
    assert code in page("python")
