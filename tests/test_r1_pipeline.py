"""R1's sequence of stages, the script as shipped on a task of seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extras.preferences.test_reward_model import CONFIG

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "configs" / "r1_pipeline" / "run.sh"


def _run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(SCRIPT), *options],
        cwd=folder,
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_the_five_stages_run_one_after_the_other(command_line: Any, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.yaml"
    pairs.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "steps": 2}}))
    done = _run(
        tmp_path,
        "--data.steps=2",
        "--model.cold_start.steps=60",
        BASE=str(command_line.config("r1")),
        OUT="out",
        PROBLEMS="60",
        PAIRS=str(pairs),
        GRPO_PL_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    kept = [json.loads(line) for line in (out / "2-kept.jsonl").read_text().splitlines()]
    assert kept
    assert all(row["correct"] for row in kept)
    first, last = (yaml.safe_load((out / name / "config.yaml").read_text()) for name in ("1-reasoning", "3-all-round"))
    assert last["model"]["policy"] == first["model"]["policy"]  # the base model again
    assert last["model"]["cold_start"]["demonstrations"] == "out/2-kept.jsonl"
    assert len(last["model"]["rewards"]) == len(first["model"]["rewards"]) + 1
    assert len(list((tmp_path / "cache" / "cold_start").iterdir())) == 2  # two different cold starts
    assert "extras/judges/model/mean" in (out / "3-all-round" / "metrics.csv").read_text()
    assert (out / "3-all-round" / "export" / "model.safetensors").is_file()


def test_a_folder_of_an_earlier_run_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = _run(tmp_path, OUT="out")
    assert done.returncode == 1
    assert "out exists" in done.stderr
    assert not any((tmp_path / "out").iterdir())
