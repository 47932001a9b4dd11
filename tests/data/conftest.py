"""Files of rows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """``jsonl(rows, name)`` writes a file and returns its path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return str(tmp_path / name)

    return write
