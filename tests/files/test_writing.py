"""Files and folders appear whole or not at all, also when several processes write the same one."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_pl.files.writing import link_atomically, staged, staged_folder


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    with staged(tmp_path / "new" / "file") as staging:
        staging.write_text("text")
        assert not (tmp_path / "new" / "file").exists()
    assert (tmp_path / "new" / "file").read_text() == "text"
    assert _names(tmp_path / "new") == ["file"]


def test_an_error_leaves_file_and_folder_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("before")
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "file") as staging:
        staging.write_text("after")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "folder") as staging:
        (staging / "inside").write_text("after")
        raise KeyboardInterrupt
    assert _names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "inside").read_text() == "before"


def test_a_folder_takes_the_place_of_an_earlier_one_as_a_whole(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with staged_folder(tmp_path / "folder") as staging:
            (staging / text).write_text(text)
    assert _names(tmp_path) == ["folder"]
    assert _names(tmp_path / "folder") == ["two"]
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o755


def test_of_two_that_make_the_same_folder_the_first_one_stays(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "folder", replace=False) as late:
        (late / "late").write_text("")
        with staged_folder(tmp_path / "folder", replace=False) as early:
            (early / "early").write_text("")
    assert _names(tmp_path) == ["folder"]
    assert _names(tmp_path / "folder") == ["early"]


def test_processes_that_share_a_file_never_show_a_half_written_one(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from grpo_pl.files.writing import staged
file = Path({str(tmp_path / "shared")!r})
for _ in range(100):
    with staged(file, shared=True) as staging:
        staging.write_text("x" * 100_000)
    assert len(file.read_text()) == 100_000
"""
    writers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert _names(tmp_path) == ["shared"]


def test_a_link_is_moved_in_one_step(tmp_path: Path) -> None:
    for target in ("one", "two"):
        (tmp_path / target).write_text(target)
        link_atomically(tmp_path / "link", target)
        assert (tmp_path / "link").read_text() == target
    assert _names(tmp_path) == ["link", "one", "two"]


def test_all_files_of_a_folder_can_be_read_by_whoever_may_read_any(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "export") as staging:
        (staging / "private").write_text("weights")
        (staging / "private").chmod(0o600)
        (staging / "usual").write_text("manifest")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "export").iterdir()}
    assert modes.keys() == {"private", "usual"} and modes["private"] == modes["usual"]
