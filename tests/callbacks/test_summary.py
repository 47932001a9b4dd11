"""The table at the end of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_pl.callbacks.summary import ClosingTable
from grpo_pl.files.runs import RunFolder


def _trainer(**metrics: float) -> Any:
    named = {name.replace("__", "/").replace("pass1", "pass@1"): torch.tensor(v) for name, v in metrics.items()}
    return SimpleNamespace(callback_metrics=named, is_global_zero=True)


def test_every_set_of_held_out_problems_has_its_row_and_only_files_that_are_there_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    table = ClosingTable(folder, "grpo-pl serve")
    table.on_validation_end(_trainer(val__pass1=0.25, val__two_step__pass1=0.0, val__mean_length=9.0, lr=0.1), Any)  # type: ignore[arg-type]
    table.on_validation_end(_trainer(val__pass1=0.5, val__two_step__pass1=0.125, val__mean_length=7.0), Any)  # type: ignore[arg-type]
    table.on_fit_end(_trainer(), Any)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [["pass@1 (sampled)", "0.250", "0.500"], ["two_step: pass@1 (sampled)", "0.000", "0.125"]]
    table.load_state_dict({"first": {}})  # of a version that kept fewer
    table.on_fit_end(_trainer(), Any)  # type: ignore[arg-type]
    assert "│      – │ 0.500 │" in capsys.readouterr().out
    assert f"metrics     {folder.metrics}\n" in out
    assert not {"report", "checkpoint", "model"} & {line.split(" ")[0] for line in out.splitlines()}
