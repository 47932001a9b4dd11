"""The commands of the README's section on one's own reward, run as they are written, on a smaller quickstart."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _commands(heading: str) -> str:
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


def _smaller(config: Path, **changes: Any) -> None:
    tree = yaml.safe_load(config.read_text())
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    config.write_text(yaml.safe_dump(tree))


def _run(commands: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "GRPO_PL_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with the shipped configurations, made smaller, where the main job was run."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", place / "configs")
    quickstart = yaml.safe_load((place / "configs" / "quickstart.yaml").read_text())
    scratch = {**quickstart["model"]["policy"]["from_scratch"], **SMALL, "num_key_value_heads": 2}
    _smaller(
        place / "configs" / "quickstart.yaml",
        model__policy__from_scratch=scratch,
        model__cold_start={"steps": 5, "batch_size": 8},
        data__steps=2,
        data__prompts_per_step=4,
        data__val_prompts=8,
    )
    _run("grpo-pl fit --config configs/quickstart.yaml", place)
    return place


def test_own_reward(folder: Path) -> None:
    _run(_commands("Your own reward"), folder)
    assert "rewards/brevity/mean" in (folder / "runs" / "my_reward" / "metrics.csv").read_text().splitlines()[0]
