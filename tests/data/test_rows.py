"""What sources of rows share: the permutation, and rows that are read when asked for."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.rows import RowPrompts, permuted
from grpo_pl.data.tables import TablePrompts


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_a_permutation_hits_every_number_once(size: int) -> None:
    assert sorted(permuted(i, size, 5) for i in range(size)) == list(range(size))
    if size == 1000:
        assert [permuted(i, size, 5) for i in range(20)] != [permuted(i, size, 6) for i in range(20)]


def test_both_kinds_of_file_hold_out_and_order_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(30)))
    lines, table = (kind(path=str(file), val_share=0.2) for kind in (JsonLinesPrompts, TablePrompts))
    for ask in (RowPrompts.validation, lambda s: s.prompts(1, count=6), lambda s: s.prompts(0, 5, count=6)):
        answers = [prompt.answer for prompt in ask(lines)]
        assert answers and answers == [prompt.answer for prompt in ask(table)]


def test_rows_are_a_sequence(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(5)))
    rows = TablePrompts(path=str(file), val_share=0.0).problems("train")
    assert [prompt.id for prompt in rows] == [0, 1, 2, 3, 4]
    assert (rows[-1].id, [prompt.id for prompt in rows[1:4:2]]) == (4, [1, 3])
    with pytest.raises(IndexError):
        rows[5]
    rows.leave_out({1, 2})
    assert ([prompt.id for prompt in rows], len(rows)) == ([0, 3, 4], 3)


def test_the_rows_of_a_cold_start_are_never_asked_by_a_rollout(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(60)))
    source = JsonLinesPrompts(path=str(file), val_share=0.0, demonstrated_share=0.5)
    shown = {row.id for step in range(-9, 0) for row in source.prompts(step, count=10)}
    asked = {row.id for step in range(9) for row in source.prompts(step, count=10)}
    assert len(shown) == source.demonstrated() and shown | asked == set(range(1, 61)) and not shown & asked
    assert 20 <= len(shown) <= 40
    twice = tmp_path / "twice.jsonl"  # a question that is shown in one row is not asked in another
    twice.write_text("".join(json.dumps({"question": f"{i % 30}?", "answer": str(i)}) + "\n" for i in range(60)))
    rows = JsonLinesPrompts(path=str(twice), val_share=0.0, demonstrated_share=0.5)
    parts = [
        {row.question for step in steps for row in rows.prompts(step, count=4)} for steps in (range(-9, 0), range(9))
    ]
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    source.leave_out({"train": shown})
    with pytest.raises(ValueError, match=r"of which a step of this kind may take 0, .* lower model.cold_start"):
        source.prompts(-1, count=1)
    assert JsonLinesPrompts(path=str(file), val_share=0.0).demonstrated() == 60


def test_a_file_that_changes_during_a_run_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    source = JsonLinesPrompts(path=str(file), val_share=0.0)
    assert len(source.problems("train")) == 2
    file.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "" }\n')
    with pytest.raises(ValueError, match=r"line 2 of .* has changed since the run began"):
        list(source.problems("train"))


PEAK = """
import sys, threading, time
from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.overlap import find_overlaps
from grpo_pl.data.tables import TablePrompts

def own_memory():  # MiB; pages of mapped files, which the system may drop, are not among it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

def watch():
    while True:
        peak[0] = max(peak[0], own_memory())
        time.sleep(0.02)

peak = [0]
before = own_memory()
threading.Thread(target=watch, daemon=True).start()
source = {"lines": JsonLinesPrompts, "table": TablePrompts}[sys.argv[1]](path=sys.argv[2], val_share=0.001)
held_out = source.validation(100)
for step in range(20):
    assert len(source.prompts(step, count=32)) == 32
assert len(find_overlaps(source.problems("train"), {"val": held_out})["val"].alike) == 100
print(peak[0] - before)
"""


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("large") / "large.jsonl"
    words = [f"w{i}" for i in range(400)]
    stories = [" ".join(words[i : i + 380]) for i in range(20)]
    with file.open("w") as out:
        for i in range(600_000):
            out.write(f'{{"question": "{i} {stories[i % 20]}", "answer": "{i}"}}\n')
    assert file.stat().st_size > 10**9
    yield file
    shutil.rmtree(file.parent)  # pytest would keep it


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mebibytes"), [("lines", 64), ("table", 256)])
def test_a_file_of_a_gigabyte_is_not_held_in_memory(gigabyte: Path, kind: str, mebibytes: int) -> None:
    environment = {**os.environ, "HF_DATASETS_CACHE": str(gigabyte.parent / "cache")}
    command = [sys.executable, "-c", PEAK, kind, str(gigabyte)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < mebibytes  # beside the interpreter and its libraries
