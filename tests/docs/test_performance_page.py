"""The page's list of code for GPUs is complete, and the script for a GPU asks the benchmarks for what they offer."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, loaded, page, section

BENCHMARKS = ROOT / "benchmarks"
gpu, gpu_wheels = (loaded(BENCHMARKS / f"{name}.py") for name in ("gpu", "gpu_wheels"))


def _only_on_gpus(file: Path) -> bool:
    """Whether code, not prose, of the file speaks of CUDA."""
    text = file.read_text()
    if "cuda" not in text.lower():
        return False
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = [
        node.attr if isinstance(node, ast.Attribute) else node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Constant) and id(node) not in prose
    ]
    return any(isinstance(word, str) and "cuda" in word.lower() for word in words)


def test_the_page_lists_every_file_with_code_that_only_a_gpu_takes() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", section(page("performance"), "On a GPU"), re.MULTILINE)
    found = [file for folder in ("grpo_pl", "serve") for file in (ROOT / folder).rglob("*.py") if _only_on_gpus(file)]
    assert sorted(listed) == sorted(str(file.relative_to(ROOT)) for file in found)


def _strings(name: str) -> set[str]:
    """All strings in a benchmark and in what it shares with others."""
    trees = [ast.parse((BENCHMARKS / file).read_text()) for file in (name, "common.py")]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_every_option_of_a_part_is_one_of_its_benchmark(part: Any, rehearse: bool, tmp_path: Path) -> None:
    command = part.command(tmp_path, rehearse=rehearse)
    assert part.minutes <= gpu.LIMIT_MINUTES
    if part.script == "pytest":
        files = [ROOT / word for word in command if word.startswith("tests/")]
        assert files and all("mark.gpu" in file.read_text() for file in files)
        return
    words = [word.partition("=") for word in command[2:]]
    given = {word for pair in words for word in pair[::2]} - {str(tmp_path), ""}
    assert {word for word in given if not re.fullmatch(r"\d+(x\d+)?", word)} <= _strings(part.script)
    assert command[-2:] == [f"--device={'cpu' if rehearse else 'cuda'}", f"--output={tmp_path}"]


def test_parts_have_names_of_their_own() -> None:
    assert len({part.name for part in gpu.PARTS}) == len(gpu.PARTS)


def test_the_shell_script_is_one() -> None:
    subprocess.run(["bash", "-n", BENCHMARKS / "gpu.sh"], check=True)


def test_a_part_that_fails_says_why_and_the_next_call_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes: a benchmark that writes its record, one that is broken, one that hangs."""
    scripts = {
        "works.py": "import json, sys; open(sys.argv[-1].partition('=')[2], 'w').write(json.dumps({'found': 1}))",
        "broken.py": "raise SystemExit('no such figure')",
        "hangs.py": "import time; time.sleep(600)",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    parts = [gpu.Part(name.removesuffix(".py"), name, "", "", 0.01) for name in ("broken.py", "hangs.py", "works.py")]
    monkeypatch.setattr(gpu, "PARTS", parts)

    def call(*arguments: str) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "records"), *arguments])
        assert gpu.main() == 1  # something is missing each time
        return capsys.readouterr().out, gpu.read_done(tmp_path / "records")

    said, done = call("--only", "broken", "works")
    assert "broken: exit status 1\n  no such figure" in said and "missing: hangs, broken\n" in said
    assert done["works"]["record"] == {"found": 1}
    (tmp_path / "broken.py").write_text(scripts["works.py"])
    (tmp_path / "works.py").unlink()  # has its record, and is not run again
    said, done = call("--only", "broken", "works")
    assert done["broken"]["record"] == {"found": 1} and "works:" not in said
    said, done = call("--minutes", "0.001")
    assert "hangs: left for the next call" in said and "hangs" not in done
    monkeypatch.setattr(gpu, "LIMIT_MINUTES", 0.01)
    said, done = call()
    assert done["hangs"]["failed"] == "stopped after 1 s" and "record" not in done["hangs"]


@pytest.mark.slow
def test_wheels_are_gathered_for_what_is_not_there_and_for_what_that_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    _wheel(index, "first", "1.0", ["second>=2", "there", "third; python_version < '3'", "plugin; extra == 'more'"])
    _wheel(index, "second", "2.1", ["first"])
    _wheel(index, "second", "1.0", [])
    _wheel(index, "plugin", "3.0", [])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    there = tmp_path / "there.txt"
    there.write_text("# what there is\nThere==1.2\n")
    (tmp_path / "wheels").mkdir()
    wanted = [gpu_wheels.Requirement("first[more]")]
    found = gpu_wheels.gather(wanted, gpu_wheels.names(there), tmp_path / "wheels")
    assert {name: file.name for name, file in found.items()} == {
        "first": "first-1.0-py3-none-any.whl",
        "second": "second-2.1-py3-none-any.whl",
        "plugin": "plugin-3.0-py3-none-any.whl",
    }
    with pytest.raises(ValueError, match="no wheel of lacking"):
        gpu_wheels.gather([gpu_wheels.Requirement("lacking")], set(), tmp_path / "wheels")


def _wheel(folder: Path, name: str, version: str, requires: list[str]) -> None:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
