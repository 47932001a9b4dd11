"""The engine of docs/engines.md runs as it stands there."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import as_module, blocks, page


def test_a_run_takes_the_engine_of_the_page(command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(page("engines"), "python", "# my_parts.py")
    as_module("my_parts", block, tmp_path, monkeypatch)
    (named,) = [block for block in blocks(page("engines"), "yaml") if "{class_path: my_parts" in block]
    engine = yaml.safe_load(named)["model"]["engine"] | {"init_args": {"tokens_per_update": 2}}
    config = command_line.config(
        "growing", model__engine=engine, model__sampling={"max_completion_length": 5}, data__steps=4
    )
    command_line.done("fit", "--config", config)
    rows = list(csv.DictReader((command_line.runs / "growing" / "metrics.csv").open()))
    longest = [float(row["completions/max_length"]) for row in rows if row["completions/max_length"]]
    assert longest == [2, 4, 5, 5]
