"""R1's sequence of stages, the script as shipped on a task of seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

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
    base = command_line.config("r1", model__policy__characters="from_data")
    pairs, sft = tmp_path / "pairs.yaml", tmp_path / "sft.yaml"
    pairs.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "steps": 2}}))
    sft.write_text("{data: {rows: {val_share: 0}, steps: 60, rows_per_step: 8}}")
    done = _run(
        tmp_path,
        "--data.steps=2",
        "--model.cold_start.steps=60",
        BASE=str(base),
        OUT="out",
        PROBLEMS="60",
        PAIRS=str(pairs),
        SFT=str(sft),
        GRPO_PL_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    kept = [json.loads(line) for line in (out / "3-kept.jsonl").read_text().splitlines()]
    assert kept
    assert all(row["correct"] for row in kept)
    stages = ("2-reasoning", "4-sft", "5-all-round")
    reasoning, tuned, all_round = (yaml.safe_load((out / name / "config.yaml").read_text()) for name in stages)
    assert tuned["model"]["policy"] == reasoning["model"]["policy"]  # the base model again
    assert tuned["model"]["template"] == reasoning["model"]["template"]
    assert tuned["data"]["rows"]["path"] == "out/3-kept.jsonl"
    assert all_round["model"]["policy"]["path"] == "out/4-sft/export"
    assert all_round["model"]["cold_start"] is None  # though an option of the command line names one, for stage 1
    assert len(list((tmp_path / "cache" / "cold_start").iterdir())) == 1
    assert len(all_round["model"]["rewards"]) == len(reasoning["model"]["rewards"]) + 1
    assert "rewards/model/mean" in (out / "5-all-round" / "metrics.csv").read_text()
    before, after = (load_file(out / name / "export" / "model.safetensors") for name in stages[1:])
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)  # the same vocabulary


def test_a_folder_of_an_earlier_run_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = _run(tmp_path, OUT="out")
    assert done.returncode == 1
    assert "out exists" in done.stderr
    assert not any((tmp_path / "out").iterdir())
