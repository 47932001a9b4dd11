"""Run folders: none is ever taken twice."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_pl.files.runs import claim_run_folder


def test_an_existing_name_gets_the_next_number_and_what_lies_there_stays(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("a file of that name")
    first = claim_run_folder(tmp_path, "quick")
    first.metrics.write_text("mine")
    names = [claim_run_folder(tmp_path, name).path.name for name in ("quick", "quick", "other", "note")]
    assert names == ["quick-2", "quick-3", "other", "note-2"]
    assert (tmp_path / "quick" / "metrics.csv").read_text() == "mine"


def test_a_file_in_place_of_the_folder_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a note")
    for root in (tmp_path / "runs", tmp_path / "runs" / "deep"):
        with pytest.raises(ValueError, match=re.escape(f"--runs_dir {root} cannot be a folder")):
            claim_run_folder(root, "quick")


def test_runs_that_start_together_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: claim_run_folder(tmp_path, "quick").path, range(24)))
    assert len(set(paths)) == 24
