"""The core alone: a copy of the package whose only extra is the kernels trains all the same."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import grpo_pl

PACKAGE = Path(grpo_pl.__file__).parent
FIT = (
    *("fit", "--config=quickstart.yaml", "--data.steps=2"),
    *("--trainer.val_check_interval=2", "--data.prompts_per_step=4", "--data.val_prompts=4"),
    *("--model.cold_start.steps=2", "--runs_dir=runs", "--name=run"),
)
TIMES = re.compile(r"time/|memory|per_second|step_time")


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """The folder of a copy of the package without extras but kernels."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "core" / "grpo_pl", ignore=ignored)
    for entry in (tmp_path / "core" / "grpo_pl" / "extras").iterdir():
        if entry.is_dir() and entry.name != "kernels":
            shutil.rmtree(entry)
    return tmp_path / "core"


def _run(source: Path, folder: Path, *commands: Sequence[str]) -> str:
    """What these commands print, one after the other in a process of their own."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    code = (
        f"import sys, grpo_pl; assert grpo_pl.__file__.startswith({str(source)!r}), grpo_pl.__file__;"
        "import json; from grpo_pl.cli.main import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def _made(folder: Path) -> dict[str, str]:
    run = folder / "runs" / "run"
    header, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(header) if not TIMES.search(name)]
    files = {"completions.jsonl": (run / "completions.jsonl").read_bytes()}
    files |= {f"{p.parent.name}/{p.name}": p.read_bytes() for p in folder.rglob("*.safetensors")}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return digests | {"metrics.csv": "\n".join(",".join(row[i] for i in kept) for row in [header, *rows])}


def test_it_trains_resumes_validates_and_exports_to_the_same_bytes(core: Path, tmp_path: Path) -> None:
    quickstart = yaml.safe_load((PACKAGE / "configs" / "quickstart.yaml").read_text())
    del quickstart["watch"]
    told = {}
    for source in (PACKAGE.parent, core):
        folder = tmp_path / f"by_{source.name}"
        folder.mkdir()
        (folder / "quickstart.yaml").write_text(yaml.safe_dump(quickstart))
        told[source] = _run(
            source,
            folder,
            FIT,
            (*FIT, "--resume", "--data.steps=3"),
            ("validate", "--config=runs/run/config.yaml", "--ckpt_path=runs/run/checkpoints/last.ckpt"),
            ("export", "runs/run", "exported"),
        )
    assert "RewardWatch" in told[core] and "WriteReport" in told[core] and "is left out" not in told[PACKAGE.parent]
    assert _made(tmp_path / "by_core") == _made(tmp_path / f"by_{PACKAGE.parent.name}")
