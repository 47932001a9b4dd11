"""Modules are loaded by name or by file, as real modules, and a file that fails leaves nothing behind."""

import json
import pickle
import sys
from pathlib import Path

import pytest

from grpo_pl.processes.modules import load_module


def test_a_name_is_imported() -> None:
    assert load_module("json") is json


def test_a_file_is_a_module_whose_classes_can_be_pickled(tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\n")
    module = load_module(str(file))
    assert sys.modules[module.__name__] is module and module.__file__ == str(file)
    assert pickle.loads(pickle.dumps(module.Point(3))) == module.Point(3)
    file.write_text("x = 5\n# another length")
    assert load_module(str(file)).x == 5


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load_module(str(file))
    assert set(sys.modules) == before
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.py"):
        load_module(str(tmp_path / "absent.py"))
