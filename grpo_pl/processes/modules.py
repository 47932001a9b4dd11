"""Modules by their name or the path of their file, and what they define."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_name(reference: str) -> Any:
    """The class or function ``module:name`` or ``file.py:name``."""
    place, _, name = reference.rpartition(":")
    return getattr(load_module(place), name)


def load_module(place: str) -> ModuleType:
    """The module of that name, or of that file where ``place`` ends with ``.py``; a file is run at each call.

    Raises:
        FileNotFoundError: there is no such file.
        Exception: whatever the module raises when it is imported.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    name = f"grpo_pl_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
