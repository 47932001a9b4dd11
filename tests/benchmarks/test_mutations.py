"""``benchmarks/mutations.py`` and ``suite.py``: faults can be made, and are told from tests that fail anyway."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mutations")


def test_every_fault_has_its_place_and_its_tests(mutations: ModuleType) -> None:
    assert len(mutations.MUTATIONS) >= 40
    for mutation in mutations.MUTATIONS:
        text = mutation.file(ROOT).read_text()
        compile(text.replace(mutation.old, mutation.new), mutation.folder, "exec")
        assert all((ROOT / word).exists() for word in mutation.tests.split() if word.startswith("tests/"))


def test_a_fault_is_made_and_mended_and_one_without_a_place_is_named(mutations: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "sums.py"
    file.write_text("total = a + b\n")
    fault = mutations.Mutation("sums", "code", "a + b", "a - b", "")
    with fault.applied(tmp_path):
        assert file.read_text() == "total = a - b\n"
    assert file.read_text() == "total = a + b\n"
    (tmp_path / "code" / "other.py").write_text("a + b; a + b\n")
    with pytest.raises(ValueError, match=r"it is 2 times in code/other\.py, 1 times in code/sums\.py"):
        fault.file(tmp_path)


def test_seconds_are_summed_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    lines = ["0.50s call     tests/a.py::test_x[1]\n", "1.25s setup    tests/a.py::test_y\n", "2 passed in 3.00s\n"]
    assert importlib.import_module("suite").seconds_by_file(lines) == {"tests/a.py": 1.75}
