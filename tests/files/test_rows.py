"""JSON Lines: what is read, what is refused and where, and what a writer that is interrupted leaves."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.rows import (
    append_rows,
    json_line,
    read_lines,
    read_object,
    read_rows,
    resume_rows,
    row_writer,
)
from grpo_pl.files.writing import best_effort


def _file(folder: Path, content: bytes) -> Path:
    file = folder / "rows.jsonl"
    file.write_bytes(content)
    return file


def test_lines_are_known_by_number_and_place(tmp_path: Path) -> None:
    content = b'{"a": 1}\n\n \t\n{"a": "\xc3\xa9"}\r\n{"a": 3}'
    lines = list(read_lines(_file(tmp_path, content)))
    assert [(line.number, line.row["a"]) for line in lines] == [(1, 1), (4, "é"), (5, 3)]
    assert [content[line.offset :].split(b"\n")[0] for line in lines] == [
        b'{"a": 1}',
        b'{"a": "\xc3\xa9"}\r',
        b'{"a": 3}',
    ]


def test_byte_order_marks_are_no_part_of_the_data(tmp_path: Path) -> None:
    file = _file(
        tmp_path, BOM_UTF8 + b'{"a": 1}\n' + BOM_UTF8 + b"\n" + BOM_UTF8 + b'{"a": 2}\n'
    )  # files joined by cat
    assert list(read_rows(file)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    text = json.dumps({"a": f"one{separator}two"}, ensure_ascii=separator < " ")
    assert list(read_rows(_file(tmp_path, f"{text}\n".encode()))) == [{"a": f"one{separator}two"}]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"not json", "is not JSON: Expecting value at character 1"),
        (b'{"a": 1', "is not JSON: Expecting ',' delimiter at character 8"),
        (b'{"a": 1} {"a": 2}', "is not JSON: Extra data at character 10"),
        (b'{"a": "\xff"}', "is not UTF-8: its byte 7 is 0xff"),
        ('{"a": "é"}'.encode("utf-16"), "is not UTF-8: its byte 0 is 0xff"),
        (b"[1, 2]", r"is not a JSON object, but b'\[1, 2\]'"),
        (b"null", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b"[" * 100_000, "cannot be read as JSON: .*recursion"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON: .*digits"),
    ],
)
def test_a_bad_line_is_one_complaint_with_file_and_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    file = _file(tmp_path, b'{"a": 1}\n\n' + line + b"\n{]\n")
    rows = read_rows(file)
    assert next(rows) == {"a": 1}
    with pytest.raises(ValueError, match=rf"^line 3 of '.*rows\.jsonl' {complaint}") as caught:
        next(rows)
    assert "\n" not in str(caught.value)


def test_a_last_line_that_a_crash_cut_short_is_skipped_where_that_is_expected(tmp_path: Path) -> None:
    file = _file(tmp_path, b'{"a": 1}\n{"a": 2')
    assert [line.row for line in read_lines(file, may_be_cut_short=True)] == [{"a": 1}]
    with pytest.raises(ValueError, match="line 2"):
        list(read_lines(file))


def test_a_file_of_one_object_is_named_when_it_holds_something_else(tmp_path: Path) -> None:
    assert read_object(_file(tmp_path, BOM_UTF8 + b'{\n "a": 1\n}\n')) == {"a": 1}
    with pytest.raises(ValueError, match=r"rows\.jsonl is not a JSON object"):
        read_object(_file(tmp_path, b"[]"))


@pytest.mark.parametrize("row", [{"a": "é\u2028\n"}, {"a": "\ud83d"}, {"a": [None, 1.5, {"b": True}]}])
def test_what_is_written_reads_back(tmp_path: Path, row: dict[str, Any]) -> None:
    with row_writer(tmp_path / "rows.jsonl") as write:
        write(row)
        write(row)
    assert list(read_rows(tmp_path / "rows.jsonl")) == [row, row]


def test_what_json_does_not_know_is_written_as_text() -> None:
    assert json_line({"a": Path("b")}) == '{"a": "b"}\n'


def test_an_error_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    file = _file(tmp_path, b"before")
    with pytest.raises(ZeroDivisionError), row_writer(file) as write:
        write({"a": 1 / 0})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("rows.jsonl", "before")]


def test_a_place_where_no_file_can_be_is_named_before_the_work(tmp_path: Path) -> None:
    file = _file(tmp_path, b"")
    for path, reason in (
        (tmp_path, "it is a folder"),
        (file / "inside.jsonl", "its folder cannot be made: File exists"),
    ):
        with pytest.raises(OSError, match=reason) as caught, row_writer(path):
            raise AssertionError("the block must not begin")
        assert caught.value.filename == str(path)


def test_a_run_goes_on_where_the_folder_of_a_dispensable_file_cannot_be_made(tmp_path: Path) -> None:
    path = _file(tmp_path, b"") / "inside.jsonl"
    complaint = r"inside\.jsonl cannot be written: its folder cannot be made"
    with pytest.warns(UserWarning, match=complaint), best_effort(path), row_writer(path) as write:
        write({})


def test_an_interrupted_file_is_appended_to_after_its_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert resume_rows(file) == []
    append_rows(file, [{"a": 1}, {"a": 2}])
    file.write_bytes(file.read_bytes()[:-3])
    assert resume_rows(file) == [{"a": 1}]
    append_rows(file, [{"a": 3}])
    assert list(read_rows(file)) == [{"a": 1}, {"a": 3}]
