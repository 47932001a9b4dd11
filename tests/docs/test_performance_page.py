"""The page's list of code for GPUs is complete, and what an offline machine lacks is gathered."""

import ast
import re
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, loaded, page, section

BENCHMARKS = ROOT / "benchmarks"
gpu_wheels = loaded(BENCHMARKS / "gpu_wheels.py")


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
