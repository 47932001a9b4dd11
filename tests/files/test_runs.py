"""Run folders: none is ever taken twice."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_pl.files.runs import RunFolder, claim_run_folder, newest_run_folder, start_run


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


def _newest(root: Path, name: str) -> str | None:
    folder = newest_run_folder(root, name)
    return None if folder is None else folder.path.name


def _claimed(root: Path, name: str) -> str:
    with start_run(root, name, None, first=True) as run:
        return run.folder.path.name


def test_a_run_is_found_by_the_name_that_it_was_given(tmp_path: Path) -> None:
    assert _claimed(tmp_path, "qwen-3") == "qwen-3"  # a model of that name
    assert (_newest(tmp_path, "qwen"), _newest(tmp_path, "qwen-3")) == (None, "qwen-3")
    assert [_claimed(tmp_path, "qwen") for _ in range(3)] == ["qwen", "qwen-2", "qwen-4"]
    assert [_claimed(tmp_path, name) for name in ("qwen-3", "qwen-4", "qwen-4")] == ["qwen-3-2", "qwen-4-2", "qwen-4-3"]
    found = {name: _newest(tmp_path, name) for name in ("qwen", "qwen-2", "qwen-3", "qwen-4", "qwen-3-2")}
    assert found == {"qwen": "qwen-4", "qwen-2": None, "qwen-3": "qwen-3-2", "qwen-4": "qwen-4-3", "qwen-3-2": None}
    assert [_claimed(tmp_path, name) for name in ("a[1]", "a[1]", "a1-7")] == ["a[1]", "a[1]-2", "a1-7"]
    assert _newest(tmp_path, "a[1]") == "a[1]-2"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("grpo-pl fit --config runs/small/llama.yaml --config more.yaml --data.steps=3", "llama-3"),
        ("grpo-pl fit --config=qwen.yaml --name llama", "llama-3"),
        ("grpo-pl fit --config llama.yaml --name=llama-3", "llama"),
        ("grpo-pl fit --config 'llama 3.yaml' --name 'llama-3'", "llama"),
        ("grpo-pl fit --config=configs/llama-3.yaml", "llama"),
        ("python train.py", "llama"),  # nobody claimed llama-2
        (None, "llama"),
    ],
)
def test_of_a_run_of_version_0_3_the_command_tells_its_name(tmp_path: Path, command: str | None, found: str) -> None:
    for name in ("llama", "llama-3"):
        (tmp_path / name).mkdir()
    if command is not None:
        RunFolder(tmp_path / "llama-3").record.write_text(json.dumps({"command": command}))
    assert _newest(tmp_path, "llama") == found
    (tmp_path / "llama-2").mkdir()
    if command is None or "train" in command:  # as runs of one name leave them
        assert _newest(tmp_path, "llama") == "llama-3"


def test_of_a_run_of_version_0_3_the_name_in_its_settings_counts_before_the_command(tmp_path: Path) -> None:
    settings_of = {"exp1": "name: exp1", "exp1-2": "name: null", "exp1-3": "name: exp1-3", "7": "name: 7"}
    for folder, settings in settings_of.items():
        (tmp_path / folder).mkdir()
        RunFolder(tmp_path / folder).record.write_text(json.dumps({"command": "grpo-pl fit --config my.yaml"}))
        RunFolder(tmp_path / folder).config.write_text(f"{settings}\nmodel: {{}}\n")
    assert [_newest(tmp_path, name) for name in ("exp1", "exp1-2", "exp1-3", "7")] == ["exp1", "exp1-2", "exp1-3", "7"]
    RunFolder(tmp_path / "exp1").config.write_text("name: [")  # cut short, so that nothing tells
    assert _newest(tmp_path, "exp1") == "exp1"


def test_a_folder_that_was_renamed_is_resumed_by_its_new_name(tmp_path: Path) -> None:
    made = tmp_path / "first-2"
    made.mkdir()
    RunFolder(made).made_by.write_text("first", encoding="utf-8")
    assert newest_run_folder(tmp_path, "first-2") is None  # the second run of `first`
    made.rename(tmp_path / "kept")
    found = newest_run_folder(tmp_path, "kept")
    assert found is not None and found.path == tmp_path / "kept"
