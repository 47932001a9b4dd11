"""Run folders: none is ever taken twice."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_pl.files.runs import RunFolder, claim_run_folder


def test_an_existing_name_gets_the_next_number(tmp_path: Path) -> None:
    names = [claim_run_folder(tmp_path / "runs", "quick").path.name for _ in range(3)]
    assert names == ["quick", "quick-2", "quick-3"]
    assert claim_run_folder(tmp_path / "runs", "other").path.name == "other"


def test_what_lies_in_an_earlier_run_stays(tmp_path: Path) -> None:
    first = claim_run_folder(tmp_path, "quick")
    first.metrics.write_text("mine")
    claim_run_folder(tmp_path, "quick")
    assert first.metrics.read_text() == "mine"


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "quick").write_text("a note")
    assert claim_run_folder(tmp_path, "quick").path.name == "quick-2"


def test_a_file_in_place_of_the_folder_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a note")
    for root in (tmp_path / "runs", tmp_path / "runs" / "deep"):
        with pytest.raises(ValueError, match=re.escape(f"--runs_dir {root} cannot be a folder")):
            claim_run_folder(root, "quick")


def test_runs_that_start_together_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: claim_run_folder(tmp_path, "quick").path, range(24)))
    assert len(set(paths)) == 24


def test_places_inside_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    places = [folder.config, folder.metrics, folder.last_checkpoint, folder.export]
    assert [str(place.relative_to(tmp_path)) for place in places] == [
        "config.yaml",
        "metrics.csv",
        "checkpoints/last.ckpt",
        "export",
    ]
