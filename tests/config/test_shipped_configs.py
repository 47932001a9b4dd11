"""Shipped configurations are found from anywhere, and files of one's own come first."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grpo_pl.config.presets import CONFIGS, short_name, with_shipped_configs

ROOT = Path(__file__).parents[2]


def test_a_shipped_configuration_is_found_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overlay = "configs/algorithm/dr_grpo.yaml"
    args = ["--config", "configs/quickstart.yaml", f"--config={overlay}", "--name", overlay, "--config", "my.yaml"]
    first, second = str(CONFIGS / "quickstart.yaml"), str(CONFIGS / "algorithm" / "dr_grpo.yaml")
    assert Path(first).is_file() and Path(second).is_file()
    assert [short_name(Path(path)) for path in (first, "my.yaml")] == ["configs/quickstart.yaml", "my.yaml"]
    assert with_shipped_configs(args) == ["--config", first, f"--config={second}", "--name", overlay, *args[-2:]]


def test_a_file_that_lies_here_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").touch()
    assert with_shipped_configs(["--config=configs/quickstart.yaml"]) == ["--config=configs/quickstart.yaml"]
    missing = ["-c", "configs/no_such.yaml"]
    assert with_shipped_configs(missing) == missing


@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without"])
def test_a_wheel_holds_every_file_that_the_package_reads(tmp_path: Path, compiler: bool) -> None:
    """The decode kernel is in it where there is a C compiler; where there is none, nothing fails."""
    pytest.importorskip("setuptools", minversion="77")
    if compiler and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "grpo_pl", "serve", "configs"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode != 0:
        pytest.skip("needs a git checkout")
    for name in ("grpo_pl", "serve", "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "_decode*")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    environment = dict(os.environ) if compiler else {**os.environ, "CC": "no-such-compiler", "PATH": "/nowhere"}
    made = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(made, cwd=source, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        name.replace("configs/", "grpo_pl/configs/", 1) if name.startswith("configs/") else name
        for name in tracked.stdout.split()
    }
    assert wanted - names <= {"grpo_pl/configs", "serve/Dockerfile"}
    assert any(name.startswith("grpo_pl/rollout/native/_decode") for name in names) == compiler
