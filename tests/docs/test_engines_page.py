"""The engine of docs/engines.md runs as it stands there."""

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_a_run_takes_the_engine_of_the_page(command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n# my_parts\.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_parts.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    (named,) = re.findall(
        r"^```yaml\n(model:\n  engine: \{class_path: my_parts.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    engine = yaml.safe_load(named)["model"]["engine"] | {"init_args": {"tokens_per_update": 2}}
    config = command_line.config(
        "growing", model__engine=engine, model__sampling={"max_completion_length": 5}, data__steps=4
    )
    command_line.done("fit", "--config", config)
    rows = list(csv.DictReader((command_line.runs / "growing" / "metrics.csv").open()))
    longest = [float(row["completions/max_length"]) for row in rows if row["completions/max_length"]]
    assert longest == [2, 4, 5, 5]
