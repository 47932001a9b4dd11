"""A policy, a request, and the engines of ``tests/plugins/child_engines.py``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).parents[3] / "plugins"


@pytest.fixture(scope="session", autouse=True)
def _plugins() -> Iterator[None]:
    """Child processes look for modules where this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGINS)
        yield
        sys.modules.pop("child_engines", None)


@pytest.fixture(scope="session")
def make_engine(_plugins: None) -> Iterator[Any]:
    """``make_engine("NativeInChild", …)``; all are closed at the end."""
    import child_engines

    made = []

    def make(name: str = "NativeInChild", **fields: Any) -> Any:
        made.append(getattr(child_engines, name)(**fields))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
