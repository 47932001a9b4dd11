"""Text files as tables: rows by number, several forms of JSON, and what cannot be read, by file and line."""

import gzip
import os
import pickle
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.tables import TextTable, format_of


def _table(folder: Path, name: str, content: bytes | str, **arguments: Any) -> TextTable:
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(raw)
    return TextTable(folder / name, **arguments)


def _rows(table: TextTable) -> list[dict[str, Any]]:
    rows = list(table.read(range(len(table))))
    assert list(table.read(reversed(range(len(table))))) == rows[::-1]
    return rows


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "json"),
        ("A.JSON", "json"),
        ("x.y.NdJson.GZ", "json"),
        ("a.tsv", "csv"),
        ("a.csv.gz", "csv"),
        ("a.Parquet", "parquet"),
        ("a.parquet.gz", ""),
        ("a.gz", ""),
        ("csv", ""),
        ("a.txt", ""),
    ],
)
def test_a_file_is_read_by_its_ending(name: str, kind: str) -> None:
    assert format_of(name) == kind


def test_cells_of_csv_may_hold_anything(tmp_path: Path) -> None:
    long = "x" * 200_000
    text = f'q,a\r\n"one\n""two"", three\u2028",007\r\n\r\n é , \r\n"",{long}\n"\rz",1'
    table = _table(tmp_path, "rows.csv", BOM_UTF8 + text.encode())
    told = [('one\n"two", three\u2028', "007"), (" é ", " "), ("", long), ("\rz", "1")]
    assert _rows(table) == [{"q": q, "a": a} for q, a in told]
    assert table.columns == ["q", "a"]
    assert _table(tmp_path, "index.csv", ",q\n0,a\n").columns == ["Unnamed: 0", "q"]
    assert _rows(_table(tmp_path, "only.csv", "q,a\n")) == []


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("packed", [False, True])
def test_cells_that_are_missing_at_the_end_of_a_row_are_empty_whatever_ends_lines(
    tmp_path: Path, end: str, packed: bool
) -> None:
    lines = ["q,a,level,topic", "é,1,2,sums", "b,2,3", "", '"c\r\nd\re\nf",3', "", "", "g,4,,x"]
    content = end.join(lines).encode()
    name = "rows.csv.gz" if packed else "rows.csv"
    table = _table(tmp_path, name, gzip.compress(content, mtime=0) if packed else content, written=["q", "a"])
    cells = [["é", "1", "2", "sums"], ["b", "2", "3", ""], ["c\r\nd\re\nf", "3", "", ""], ["g", "4", "", "x"]]
    assert [list(row.items()) for row in _rows(table)] == [list(zip(table.columns, row, strict=True)) for row in cells]
    assert table.columns == ["q", "a", "level", "topic"]
    with pytest.raises(ValueError, match=r"line 4 .* has 1 cells"):
        _table(tmp_path, "short.csv", end.join(["q,a", "1,2", "", "3"]), written=["q", "a"])


def test_json_lines_and_arrays_give_the_same_rows(tmp_path: Path) -> None:
    lines = ['{"a": 1.50, "é": "x\u2028\u2029]"}', '{"a": [1, {"b": "},{"}]}', '{"a": 3, "b": null}']
    for name, text in {
        "rows.jsonl": "\n\n".join(lines) + "\n \n",
        "rows.json": "[" + ",\n".join(lines) + "]\n",
        "spread.json": "\ufeff [\n" + " ,\t".join(lines) + "\n\n] ",
        "rows.jsonl.gz": "\ufeff" + "\n\ufeff".join(lines),
        "objects.json": "\n".join("{\n" + line[1:] for line in lines),
    }.items():
        content = gzip.compress(text.encode()) if name.endswith("gz") else text
        table = _table(tmp_path, name, content, written=["a"])
        first, second, third = _rows(table)
        assert first == {"a": "1.50", "é": "x\u2028\u2029]"}, name
        assert (second["a"][0], third) == (1, {"a": 3, "b": None}), name
        assert table.columns == ["a", "é", "b"]
    assert _rows(_table(tmp_path, "none.json", "[ ]")) == []


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", b"", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("a.json", b"", "is empty"),
        ("a.csv", b"q,a\n1,2\n3\n", "line 3 .* has 1 cells, and the header names 2 columns"),
        ("a.csv", b'q,a\n"1\n2",x\n\n1,2,3\n', "line 5 .* has 3 cells"),
        ("a.csv", b'q,a\n1,2\n"3,4\n5,6\n', "line 3 .* cannot be read as CSV: unexpected end of data"),
        ("a.csv", b'q,a\n"1"x,2\n', "line 2 .* cannot be read as CSV"),
        ("a.csv", b"q,a,q\n1,2,3\n", "line 1 .* names two columns 'q'"),
        ("a.csv", b"q,a\n1,2\n\xff,2\n", "line 3 .* is not UTF-8: its byte 0 is 0xff"),
        ("a.csv", b"q,a\n\xed\xa0\xbd,2\n", "line 2 .* is not UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\\ud83d"}\n', r"line 2 .* holds '\\ud83d', half a surrogate pair"),
        ("a.json", b'[{"a": 1},\n\n{"a": ["\\uDE00"]}]', r"line 3 .* holds '\\ude00', half a surrogate pair"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2', "line 3 .* is not JSON"),
        ("a.jsonl", b'{"a": 1}\n7\n', "line 2 .* is not a JSON object"),
        ("a.json", b'[{"a": 1},\n{"a": 2}', "line 2 .* is not JSON"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', "line 2 .* is not JSON: Expecting ',' delimiter at character 1"),
        ("a.json", b'[{"a": 1},\n]', "line 2 .* is not JSON"),
        ("a.json", b'[{"a": 1}]\n{"a": 2}', "line 1 .* is not JSON"),
        ("a.json", b'[{"a": 1},\n[2]]', "line 2 .* is not a JSON object"),
        ("a.json", b'{\n"a": 1\n}\n{\n"a": x}', "line 5 .* is not JSON"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', "line 2 .* is not UTF-8: its byte 7 is 0xff"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n{]\n', mtime=0), "line 2 .* is not JSON"),
        ("a.jsonl.gz", b"no archive", r"a\.jsonl\.gz' is cut short or damaged behind line 0"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        _table(tmp_path, name, content, written=["a"])
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_an_archive_that_is_cut_short_says_behind_which_line(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"a": "%s"}\n' % os.urandom(40).hex().encode() for _ in range(2000)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz' is cut short or damaged behind line (1\d\d\d|[6-9]\d\d): "):
        _table(tmp_path, "a.jsonl.gz", whole[: 3 * len(whole) // 4])


def test_a_table_can_be_sent_to_another_process(tmp_path: Path) -> None:
    table = _table(tmp_path, "rows.jsonl.gz", gzip.compress(b'{"a": 1.50}\n', mtime=0), written=["a"])
    assert _rows(pickle.loads(pickle.dumps(table))) == [{"a": "1.50"}]
