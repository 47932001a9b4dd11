"""A JSON Lines file read line by line: order, splits, memory, and what is wrong with it by line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.json_lines import JsonLinesPrompts


def _write(file: Path, rows: Sequence[Any]) -> str:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def _rows(count: int, tag: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{tag} {i}?", "answer": f"so #### {i}", "level": i % 3} for i in range(count)]


@pytest.fixture
def source(tmp_path: Path) -> JsonLinesPrompts:
    return JsonLinesPrompts(path=_write(tmp_path / "a.jsonl", _rows(40)), val_share=0.25, answer_pattern=r"####\s*(.+)")


def test_an_epoch_gives_every_training_line_once(source: JsonLinesPrompts) -> None:
    lines, steps = len(source.problems("train")), len(source.problems("train")) // 5
    seen = [prompt.id for step in range(steps) for prompt in source.prompts(step, count=5)]
    assert len(set(seen)) == len(seen) == 5 * steps
    assert lines - 5 < len(seen) <= lines
    again = [prompt.id for step in range(steps, 2 * steps) for prompt in source.prompts(step, count=5)]
    assert again != seen  # the next epoch has another order


def test_questions_answers_columns_and_splits(source: JsonLinesPrompts) -> None:
    everyone = [*source.problems("train"), *source.problems("val")]
    assert sorted(prompt.id for prompt in everyone) == list(range(1, 41))
    for prompt in everyone:
        number = prompt.id - 1
        assert (prompt.question, prompt.answer, prompt.columns) == (f"q {number}?", str(number), {"level": number % 3})
    assert 1 <= len(source.validation()) < 20
    assert source.validation(2) == source.validation()[:2]


def test_a_column_named_prompt_is_the_question_where_there_is_no_question(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1), "level": i} for i in range(4)]
    source = JsonLinesPrompts(path=_write(tmp_path / "trl.jsonl", rows), val_share=0)
    problems = source.problems("train")
    assert [(p.question, p.answer, dict(p.columns)) for p in problems][:1] == [("0+1", "1", {"level": 0})]
    both = [{**row, "question": f"q{row['level']}"} for row in rows]
    source = JsonLinesPrompts(path=_write(tmp_path / "both.jsonl", both), val_share=0)
    assert source.problems("train")[0].question == "q0"
    mixed = [both[0], rows[1]]
    with pytest.raises(ValueError, match="has no column 'question'; its columns are prompt, answer, level"):
        JsonLinesPrompts(path=_write(tmp_path / "mixed.jsonl", mixed), val_share=0).problems("train")


def test_attempts_of_a_step_take_other_lines(source: JsonLinesPrompts) -> None:
    drawn = [{prompt.id for prompt in source.prompts(1, attempt, count=6)} for attempt in range(3)]
    assert len(set.union(*drawn)) == 18


def test_held_out_questions_are_left_out_of_training(tmp_path: Path) -> None:
    train = _write(tmp_path / "t.jsonl", [*_rows(5), {"question": "  W  0? ", "answer": "1"}])
    val = _write(tmp_path / "v.jsonl", _rows(2, tag="w"))
    source = JsonLinesPrompts(path=train, val_path=val)
    assert [p.question for p in source.validation()] == ["w 0?", "w 1?"]
    assert len(source.problems("train")) == 5
    assert source.notes == ["1 training rows left out: their questions are held out."]


def test_of_the_training_lines_those_that_a_filter_kept_are_taken(source: JsonLinesPrompts, tmp_path: Path) -> None:
    chosen = [source.problems("train")[i] for i in (2, 7)]
    kept = _write(tmp_path / "kept.jsonl", [{"question": prompt.question.upper()} for prompt in chosen])
    filtered = JsonLinesPrompts(path=source.path, val_share=0.25, answer_pattern=source.answer_pattern, kept=kept)
    assert list(filtered.problems("train")) == chosen
    assert filtered.validation() == source.validation()
    assert filtered.notes == [f"2 of {len(source.problems('train'))} training rows taken: those in {kept!r}."]


def test_lines_can_be_left_out(source: JsonLinesPrompts) -> None:
    first = source.problems("train")[0].id
    source.leave_out({"train": {first}})
    assert first not in {prompt.id for prompt in source.problems("train")}


def _bad(tmp_path: Path, content: bytes, **arguments: Any) -> JsonLinesPrompts:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    return JsonLinesPrompts(path=str(file), **arguments)


GOOD = b'{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (GOOD + b'{"question": "\xff", "answer": "1"}\n', {}, r"line 2 of .* is not UTF-8: its byte 14 is 0xff"),
        (GOOD + b"\n{]\n", {}, r"line 3 of .* is not JSON"),
        (GOOD + b"[1]\n", {}, r"line 2 of .* is not a JSON object"),
        (GOOD, {"question": "problem"}, r"line 1 of .* has no column 'problem'; its columns are question, answer"),
        (GOOD, {"answer_pattern": "#### (.*)"}, r"1 of 1 rows .* \(line 1: '1'\) with answer_pattern '#### \(\.\*\)'"),
        (GOOD + b'{"question": "b", "answer": ""}\n', {}, r"1 of 2 rows .* \(line 2: ''\)\. Mend"),
        (b"\n", {}, "is empty: it has no rows"),
        (GOOD, {"val_share": 0.999999}, "no training rows: all 1 are held out"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_clear_line(
    tmp_path: Path, content: bytes, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _bad(tmp_path, content, **arguments).problems("train")
    assert "\n" not in str(caught.value)


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a group"):
        JsonLinesPrompts(path="x", answer_pattern="####")
    with pytest.raises(ValueError, match="is no regular expression"):
        JsonLinesPrompts(path="x", answer_pattern="(")
    with pytest.raises(ValueError, match=r"there is no file '.*none\.jsonl'"):
        JsonLinesPrompts(path=str(tmp_path / "none.jsonl")).problems("train")


def test_bad_lines_can_be_dropped(tmp_path: Path) -> None:
    source = _bad(tmp_path, GOOD + b'{"question": "b", "answer": ""}\n', bad_rows="drop", val_share=0.0)
    assert [prompt.question for prompt in source.problems("train")] == ["a"]
    assert "1 of 2 rows" in source.notes[0]
