"""What sources of rows share: splits, order and epochs, rows that are read when asked for, and what is refused."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.rows import RowPrompts, permuted
from grpo_pl.data.tables import TablePrompts

KINDS: list[type[RowPrompts]] = [JsonLinesPrompts, TablePrompts]
each = pytest.mark.parametrize("kind", KINDS)
Write = Callable[..., str]


def _rows(count: int, tag: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{tag} {i}?", "answer": f"so\n#### {i}", "level": i % 3} for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_a_permutation_hits_every_number_once(size: int) -> None:
    assert sorted(permuted(i, size, 5) for i in range(size)) == list(range(size))
    if size == 1000:
        assert [permuted(i, size, 5) for i in range(20)] != [permuted(i, size, 6) for i in range(20)]


def test_both_kinds_of_file_hold_out_and_order_the_same_rows(jsonl: Write) -> None:
    lines, table = (kind(path=jsonl(_rows(30)), val_share=0.2) for kind in KINDS)
    for ask in (RowPrompts.validation, lambda s: s.prompts(1, count=6), lambda s: s.prompts(0, 5, count=6)):
        answers = [prompt.answer for prompt in ask(lines)]
        assert answers and answers == [prompt.answer for prompt in ask(table)]


@each
def test_rows_are_a_sequence_of_problems(kind: type[RowPrompts], jsonl: Write) -> None:
    rows = kind(path=jsonl(_rows(5)), val_share=0.0, answer_pattern=r"####\s*(.+)").problems("train")
    first = rows[0].id  # lines are counted from 1
    assert [(p.id - first, p.question, p.answer, dict(p.columns)) for p in rows] == [
        (i, f"q {i}?", str(i), {"level": i % 3}) for i in range(5)
    ]
    assert (rows[-1].question, [prompt.question for prompt in rows[1:4:2]]) == ("q 4?", ["q 1?", "q 3?"])
    with pytest.raises(IndexError):
        rows[5]
    rows.leave_out({first + 1, first + 2})
    assert ([prompt.id - first for prompt in rows], len(rows)) == ([0, 3, 4], 3)


def test_a_step_is_a_function_of_its_number_and_an_epoch_gives_each_row_once(jsonl: Write) -> None:
    path = jsonl(_rows(23))
    one, other = (JsonLinesPrompts(path=path, val_share=0, seed=5) for _ in range(2))
    epoch = [one.prompts(step, count=4) for step in range(5)]  # 23 rows: 5 steps, 3 rows wait
    assert other.prompts(3, count=4) == epoch[3]
    ids = [prompt.id for step in epoch for prompt in step]
    assert len(set(ids)) == 20
    assert [prompt.id for prompt in one.prompts(5, count=4)] != ids[:4]  # another epoch, another order
    assert JsonLinesPrompts(path=path, val_share=0, seed=6).prompts(3, count=4) != epoch[3]


def test_a_further_attempt_gives_rows_that_the_earlier_ones_did_not(jsonl: Write) -> None:
    source = JsonLinesPrompts(path=jsonl(_rows(20)), val_share=0)
    tries = [{prompt.id for prompt in source.prompts(2, attempt, count=6)} for attempt in range(4)]
    assert all(len(ids) == 6 for ids in tries)
    assert not tries[0] & tries[1] and not (tries[0] | tries[1]) & tries[2]
    assert len(set.union(*tries)) == 20  # 2 rows were left for the fourth attempt; the other 4 repeat
    with pytest.raises(ValueError, match=r"has 20 training rows and a step asks for 21: lower data\.prompts_per_step"):
        source.prompts(0, count=21)


def test_no_question_is_both_held_out_and_trained_on(jsonl: Write) -> None:
    rows = _rows(200) + [{**row, "question": row["question"].upper() + " "} for row in _rows(200)]
    source = JsonLinesPrompts(path=jsonl(rows), val_share=0.25)
    train, val = ({" ".join(p.question.split()).lower() for p in source.problems(s)} for s in ("train", "val"))
    assert not train & val and len(train | val) == 200
    assert 30 <= len(val) <= 70 and source.validation(2) == source.validation()[:2]


@each
def test_training_rows_that_a_validation_file_holds_are_left_out_and_counted(
    kind: type[RowPrompts], jsonl: Write
) -> None:
    train = jsonl([*_rows(5, tag="t"), {"question": "  Q  0? ", "answer": "1", "level": 0}])
    source = kind(path=train, val_path=jsonl(_rows(3), "val.jsonl"))
    assert [p.question for p in source.validation()] == ["q 0?", "q 1?", "q 2?"]
    assert [p.question for p in source.problems("train")] == [f"t {i}?" for i in range(5)]
    assert source.notes == ["1 training rows left out: their questions are held out."]


def test_problems_that_are_left_out_are_never_given(jsonl: Write) -> None:
    source = JsonLinesPrompts(path=jsonl(_rows(8)), val_share=0)
    source.leave_out({"train": {1, 6}})
    assert {p.id for step in range(6) for p in source.prompts(step, count=3)} == {2, 3, 4, 5, 7, 8}


@each
def test_of_the_training_rows_those_that_a_filter_kept_are_taken(
    kind: type[RowPrompts], jsonl: Write, tmp_path: Path
) -> None:
    path, kept = jsonl(_rows(12)), jsonl([{"question": f" Q {i}?"} for i in (3, 5, 99)], "kept.jsonl")
    source = kind(path=path, val_path=jsonl(_rows(2), "val.jsonl"), kept=kept)
    assert [p.question for p in source.problems("train")] == ["q 3?", "q 5?"]
    assert len(source.validation()) == 2
    assert source.notes[-1] == f"2 of 10 training rows taken: those in {kept!r}."
    with pytest.raises(ValueError, match=r"none of the 4 training rows .* is in .*: it was made of other problems"):
        kind(path=jsonl(_rows(104)[100:], "other.jsonl"), val_share=0, kept=kept).problems("train")
    with pytest.raises(ValueError, match=r"line 1 of .*no\.jsonl' was not written by"):
        kind(path=path, kept=jsonl([{"q": 1}], "no.jsonl")).problems("train")
    with pytest.raises(ValueError, match=r"cannot read data\.source\.kept .*: No such file"):
        kind(path=path, kept=str(tmp_path / "none")).problems("train")


@each
def test_unreadable_rows_are_counted_with_the_first_five_or_left_out(kind: type[RowPrompts], jsonl: Write) -> None:
    path, pattern = jsonl([{**row, "answer": "?"} if i % 2 else row for i, row in enumerate(_rows(20))]), r"####\s*(.+)"
    with pytest.raises(ValueError, match=r"10 of 20 rows .* (1|2): .* (9|10): answer '\?'\) .*bad_rows to drop"):
        kind(path=path, answer_pattern=pattern).problems("train")
    source = kind(path=path, answer_pattern=pattern, bad_rows="drop", val_share=0)
    assert [p.question for p in source.problems("train")] == [f"q {i}?" for i in range(0, 20, 2)]
    assert source.notes[0].startswith("10 of 20 rows")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("(", "is no regular expression"), ("x", "needs a group"), (None, "answer_pattern is null.*in quotes")],
)
def test_a_pattern_that_finds_no_answer_is_refused(pattern: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JsonLinesPrompts(path="x", answer_pattern=pattern)


def test_the_rows_of_a_cold_start_are_never_asked_by_a_rollout(jsonl: Write) -> None:
    path = jsonl(_rows(60))
    source = JsonLinesPrompts(path=path, val_share=0.0, demonstrated_share=0.5)
    shown = {row.id for step in range(-9, 0) for row in source.prompts(step, count=10)}
    asked = {row.id for step in range(9) for row in source.prompts(step, count=10)}
    assert len(shown) == source.demonstrated() and shown | asked == set(range(1, 61)) and not shown & asked
    assert 20 <= len(shown) <= 40
    twice = jsonl(2 * _rows(30), "twice.jsonl")  # a question that is shown in one row is not asked in another
    rows = JsonLinesPrompts(path=twice, val_share=0.0, demonstrated_share=0.5)
    parts = [
        {row.question for step in steps for row in rows.prompts(step, count=4)} for steps in (range(-9, 0), range(9))
    ]
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    source.leave_out({"train": shown})
    with pytest.raises(ValueError, match=r"of which a step of this kind may take 0, .* lower model.cold_start"):
        source.prompts(-1, count=1)
    assert JsonLinesPrompts(path=path, val_share=0.0).demonstrated() == 60


def test_a_file_that_changes_during_a_run_is_noticed(jsonl: Write) -> None:
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    source = JsonLinesPrompts(path=jsonl(rows), val_share=0.0)
    assert len(source.problems("train")) == 2
    jsonl([rows[0], {**rows[1], "answer": "  "}])
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
