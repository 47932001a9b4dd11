"""Runs, steps and files with which time travel cannot begin: one line that says what to do, and nothing written."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.main import main
from grpo_pl.extras.replay import CannotReplay, replay
from grpo_pl.files.checkpoints import remove
from tests.conftest import CommandLine, exit_status

DATA = "sums.jsonl"


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


@pytest.fixture(scope="module")
def recorded(command_line: CommandLine) -> Path:
    """A run of three rollouts on a file, with a checkpoint after each, and a branch of it before its third."""
    data = command_line.folder / DATA
    sums = [{"question": f"{one}+{two}=", "answer": str(one + two)} for one in range(5) for two in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    source = {"class_path": "grpo_pl.data.json_lines.JsonLinesPrompts", "init_args": {"path": str(data)}}
    config = command_line.config("told", data__source=source, data__steps=3, model__cold_start=None)
    command_line.done("fit", "--config", config)
    command_line.done("fit", f"--branch={command_line.runs / 'told'}@2", "--name=later")
    return command_line.runs / "told"


@pytest.fixture
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of both under ``runs`` of the current folder."""
    for name in ("told", "later"):
        shutil.copytree(recorded.parent / name, tmp_path / "runs" / name, symlinks=True)
    monkeypatch.chdir(tmp_path)
    data = recorded.parents[1] / DATA
    text = data.read_text()
    yield tmp_path / "runs" / "told"
    data.write_text(text)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_size) for file in sorted(folder.rglob("*"))}


def _edited(name: str, before: str, after: str) -> Callable[[Path, Path], None]:
    def edit(run: Path, data: Path) -> None:
        text = (run / name).read_text()
        assert before in text
        (run / name).write_text(text.replace(before, after, 1))

    return edit


def _written(name: str, text: str) -> Callable[[Path, Path], object]:
    return lambda run, data: (run / name).write_text(text)


def _keeps(*rollouts: int) -> Callable[[Path, Path], None]:
    def keep(run: Path, data: Path) -> None:
        for path in run.glob("checkpoints/rollout-*.ckpt"):
            if int(path.stem[-6:]) not in rollouts:
                remove(path)

    return keep


def _second_of_the_name(run: Path, data: Path) -> None:
    shutil.copytree(run, run.with_name("told-2"), symlinks=True)


def _without_origin(run: Path, data: Path) -> None:
    """The branch alone, without checkpoints of its own or the one that it began from."""
    _keeps()(run.with_name("later"), data)
    config = run.with_name("later") / "config.yaml"
    lines = config.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("ckpt_path: "))
    assert lines[place].endswith("rollout-000002.ckpt")
    lines[place] = f"ckpt_path: {run.with_name('gone')}/rollout-000002.ckpt"
    config.write_text("\n".join(lines) + "\n")


def _cut_short(run: Path, data: Path) -> None:
    text = (run / "completions.jsonl").read_text()
    (run / "completions.jsonl").write_text(text[: len(text) // 2])


def _garbage_without_digest(run: Path, data: Path) -> None:
    (run / "digests.jsonl").unlink()
    (run / "completions.jsonl").write_text("{}\n")


def _nothing(run: Path, data: Path) -> None: ...


CASES: dict[str, tuple[str, int, Callable[[Path, Path], object], str]] = {
    "no run": ("{run}x", 1, _nothing, "there is no run"),
    "a checkpoint in place of its run": ("{run}/checkpoints/rollout-000001.ckpt", 1, _nothing, "folder of its run"),
    "a missing checkpoint in place of its run": ("{run}/checkpoints/rollout-000009.ckpt", 1, _nothing, "there is no"),
    "a step beyond the end": ("{run}", 4, _nothing, "give 0 (its start) … 3 (its end)"),
    "a step before a branch": ("{run}/../later", 1, _nothing, "give 2 (its start) … 3 (its end)"),
    "a branch whose first checkpoint is gone": (
        "{run}/../later",
        3,
        _without_origin,
        "which is missing",
    ),
    "changed data": ("{run}", 1, lambda run, data: data.write_text(data.read_text() * 2), "put back what was there"),
    "changed data from the start": (
        "{run}",
        0,
        lambda run, data: data.write_text(data.read_text().partition("\n")[2]),
        "put back what was there",
    ),
    "changed data, another step": (
        "{run}",
        2,
        lambda run, data: (_keeps(1, 3)(run, data), data.write_text(data.read_text().replace("2+2=", "2+3="))),
        "put back what was there",
    ),
    "missing data": ("{run}", 1, lambda run, data: data.unlink(), "there is no file"),
    "an edited completion": (
        "{run}",
        1,
        _edited("completions.jsonl", '"completion": "', '"completion": "1'),
        "put back",
    ),
    "completions that are cut short": ("{run}", 1, _cut_short, "put back the file"),
    "completions that are gone": ("{run}", 1, lambda run, data: (run / "completions.jsonl").unlink(), "put back"),
    "completions that are none": ("{run}", 1, _garbage_without_digest, "completions.jsonl"),
    "another version": ("{run}", 1, _edited("run.json", '"grpo_pl": "0.', '"grpo_pl": "7.'), "install that version"),
    "an earlier version": (
        "{run}",
        1,
        _edited("run.json", '"grpo_pl": "0.4', '"grpo_pl": "0.2'),
        "install that version",
    ),
    "two runs of one name": ("told", 1, _second_of_the_name, "give the folder of one"),
    "metrics that are none": ("{run}", 1, _written("metrics.csv", "a,b\n1,2\n"), "metrics.csv"),
    "metrics without numbers": ("{run}", 1, _edited("metrics.csv", "\n1,", "\none,"), "metrics.csv"),
    "a record that is none": ("{run}", 1, _written("run.json", '{"versions": [], "resumed": [3]}'), "run.json"),
    "digests that are none": ("{run}", 1, _written("digests.jsonl", '{"weights": 3}\n'), "digests.jsonl"),
    "a configuration that is none": ("{run}", 1, _written("config.yaml", "model: 3\n"), "config.yaml"),
}
"""Case -> run, step, what is done to the run's folder and to its data, and a part of the line."""
FOUND = {
    "a step beyond the end": 0,
    "a step before a branch": 0,
    "an edited completion": 1,
    "completions that are cut short": 1,
    "completions that are gone": 1,
}
"""Exit status of ``verify`` where it is not 2: it takes no step, and edited completions are what it looks for."""


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_in_one_line_and_nothing_is_written(
    command_line: CommandLine, run: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, step, spoil, told = CASES[case]
    spoil(run, command_line.folder / DATA)
    given, runs = name.format(run=run), run.parent
    before = _files(runs)

    with pytest.raises(ValueError) as raised:
        replay(given, step, say=lambda line: None)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert _files(runs) == before

    outcome = command_line("fit", f"--branch={given}@{step}", "--name=new", runs=runs)
    assert outcome.status == 2, outcome.err
    assert told in outcome.err.splitlines()[-1] and "Traceback" not in outcome.err
    assert _files(runs) == before

    capsys.readouterr()
    status = exit_status(lambda: main(["verify", given]))
    printed = capsys.readouterr()
    assert status == FOUND.get(case, 2), printed.out + printed.err
    if status == 2:
        assert told in printed.err.splitlines()[-1] and "Traceback" not in printed.err
        assert printed.out == "" and _files(runs) == before


@pytest.mark.parametrize("given", ["much", "-3", "nan"])
def test_a_senseless_limit_of_the_cache_is_told_before_anything_is_made(
    run: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_PL_REPLAY_GB", given)
    monkeypatch.setenv("GRPO_PL_CACHE", str(run.parent / "cache"))
    with pytest.raises(CannotReplay, match="GRPO_PL_REPLAY_GB"):
        replay(run, 1, say=lambda line: None)
    assert not (run.parent / "cache").exists()
