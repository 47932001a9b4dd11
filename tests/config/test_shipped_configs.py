"""Shipped configurations are found from anywhere, and files of one's own come first."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from grpo_pl.config.shipped import CONFIGS, short_name, with_shipped_configs
from grpo_pl.extras.kernels.decode_kernel import built_kernels

ROOT = Path(__file__).parents[2]
SOURCES = ["grpo_pl", "serve", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE"]
"""All that a build of the package reads."""
NO_COMPILER = {**os.environ, "CC": "no-such-compiler", "PATH": "/nowhere"}


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_wheel_draws_with_its_kernel_where_there_is_no_compiler(tmp_path: Path) -> None:
    """Installed into a fresh environment; torch and transformers are those of this one."""
    _copy(SOURCES, tmp_path / "source")
    names = _built("wheel", tmp_path / "source", dict(os.environ))
    assert _files_of_the_package() - names <= {"grpo_pl/configs"}
    (wheel,) = (tmp_path / "source" / "built").iterdir()
    assert "-cp311-abi3-" in wheel.name  # for every Python from 3.11 on
    subprocess.run([sys.executable, ROOT / ".ci" / "wheel_has_kernel.py", wheel], check=True)
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    program = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import grpo_pl
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams
shape = dict(hidden_size=32, intermediate_size=64, vocab_size=40, num_hidden_layers=1, num_attention_heads=2)
engine, key = NativeEngine(), SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)
request = GenerateRequest(
    prompt_ids=[[1, 2]],
    keys=[[key]],
    sampling=SamplingParams(max_completion_length=4),
    eos_token_ids=[],
    pad_token_id=0,
)
print(engine.generate(LlamaForCausalLM(LlamaConfig(**shape)), request).lengths.tolist(), grpo_pl.__file__)
print(engine.describe())
"""
    environment = {**os.environ, "PATH": str(fresh / "bin"), "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    environment["GRPO_PL_NATIVE"] = next(iter(built_kernels()), "avx2")
    done = subprocess.run([str(python), "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"[4] {fresh}" in done.stdout and "the decode kernel (" in done.stdout


def test_a_wheel_of_the_source_distribution_holds_every_file_that_the_package_reads(tmp_path: Path) -> None:
    """Where there is no C compiler, it has no library of kernels, and nothing fails."""
    wanted = _files_of_the_package()
    _copy(SOURCES, tmp_path / "source")
    _built("sdist", tmp_path / "source", NO_COMPILER)
    (archive,) = (tmp_path / "source" / "built").iterdir()
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (source,) = (tmp_path / "unpacked").iterdir()
    names = _built("wheel", source, NO_COMPILER)
    assert wanted - names <= {"grpo_pl/configs"}
    assert not any(name.startswith("grpo_pl/_kernels") for name in names)


def test_images_are_built_from_all_that_the_package_needs() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted(SOURCES)


def _files_of_the_package() -> set[str]:
    """The tracked files, by their names in a wheel."""
    command = ["git", "ls-files", "grpo_pl", "serve", "configs"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("needs a git checkout")
    return {
        name.replace("configs/", "grpo_pl/configs/", 1) if name.startswith("configs/") else name
        for name in tracked.stdout.split()
    }


def _copy(names: list[str], source: Path) -> None:
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "_kernels*")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)


def _built(what: str, source: Path, environment: dict[str, str]) -> set[str]:
    """Builds a wheel or source distribution into a new folder; gives the names in a wheel."""
    pytest.importorskip("setuptools", minversion="77")
    folder = source / "built"
    folder.mkdir()
    program = f"import setuptools.build_meta as b, sys; b.build_{what}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return set(zipfile.ZipFile(built).namelist()) if what == "wheel" else set()


def test_the_image_that_trains_has_a_c_compiler() -> None:
    """Triton builds a module in C for each kernel, at run time; without a compiler a GPU computes without kernels."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    (train,) = (stage for stage in stages if re.match(r"\S+ AS train\n", stage))
    installed = re.search(r"apt-get install .*", train)
    assert installed is not None and {"gcc", "libc6-dev"} <= set(installed[0].split())
