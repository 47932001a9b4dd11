"""A JSON Lines file read line by line: columns, blank lines, and what is wrong with it by line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.json_lines import JsonLinesPrompts


def test_a_column_named_prompt_is_the_question_where_there_is_no_question(jsonl: Callable[..., str]) -> None:
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1), "level": i} for i in range(4)]
    source = JsonLinesPrompts(path=jsonl(rows), val_share=0)
    problems = source.problems("train")
    assert [(p.question, p.answer, dict(p.columns)) for p in problems][:1] == [("0+1", "1", {"level": 0})]
    both = [{**row, "question": f"q{row['level']}"} for row in rows]
    source = JsonLinesPrompts(path=jsonl(both), val_share=0)
    assert source.problems("train")[0].question == "q0"
    mixed = [both[0], rows[1]]
    with pytest.raises(ValueError, match="has no column 'question'; its columns are prompt, answer, level"):
        JsonLinesPrompts(path=jsonl(mixed), val_share=0).problems("train")


def test_blank_lines_count_and_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + GOOD + b"\n \n" + GOOD.replace(b'"a"', b'"b"'))
    problems = JsonLinesPrompts(path=str(tmp_path / "a.jsonl"), val_share=0).problems("train")
    assert [(p.id, p.question) for p in problems] == [(2, "a"), (5, "b")] and problems[1].question == "b"


GOOD = b'{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (GOOD + b"\n{]\n", {}, r"line 3 of .* is not JSON"),
        (GOOD, {"question": "problem"}, r"line 1 of .* has no column 'problem'; its columns are question, answer"),
        (
            GOOD,
            {"answer_pattern": "#### (.*)"},
            r"1 of 1 rows .* \(line 1: answer '1'\) with answer_pattern '#### \(\.\*\)'",
        ),
        (GOOD + b'{"question": "b", "answer": ""}\n', {}, r"1 of 2 rows .* \(line 2: answer ''\)\. Mend"),
        (b"\n", {}, "is empty: it has no rows"),
        (GOOD, {"val_share": 0.999999}, "no training rows: all 1 are held out"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_clear_line(
    tmp_path: Path, content: bytes, arguments: dict[str, Any], message: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        JsonLinesPrompts(path=str(file), **arguments).problems("train")
    assert "\n" not in str(caught.value)
