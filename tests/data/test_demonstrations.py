"""Demonstrations from a file: the forms that are read, the lines that are refused, and the order they come in."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.demonstrations import Demonstration, draw_in_passes, read_demonstrations


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "completion": "3"},
    {"prompt": [_user("1+2=")], "completion": [_assistant("3")]},
    {"messages": [_user("1+2="), _assistant("3")]},
    {"messages": [{"role": "system", "content": "Add."}, _user("1+2="), _assistant("3")], "id": 7},
]


def _write(folder: Path, *lines: str | bytes) -> Path:
    file = folder / "shown.jsonl"
    file.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return file


def test_every_form_says_the_same(tmp_path: Path) -> None:
    file = _write(tmp_path, *map(json.dumps, FORMS), "", "  ")
    assert read_demonstrations(file) == [Demonstration("1+2=", "3")] * 4


def test_several_turns_are_an_episode(tmp_path: Path) -> None:
    tool = {"role": "tool", "name": "calc", "content": "84"}
    turns = [_user("12*7?"), _assistant("<calc>"), tool, _assistant("84"), _user("sure?"), _assistant("yes")]
    file = _write(tmp_path, json.dumps({"messages": turns}), json.dumps({"prompt": turns[:1], "completion": turns[1:]}))
    found = read_demonstrations(file)
    assert found == [Demonstration("12*7?", "<calc>", (([tool], "84"), ("sure?", "yes")))] * 2
    assert found[0].text == "<calc>8484sure?yes"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "\xff", "completion": ""}', "not UTF-8: its byte 12"),
        ('{"prompt": "1+2="}', "prompt and completion, or messages"),
        ('{"prompt": 3, "completion": "3"}', "role and content"),
        ('{"messages": "hello"}', "role and content"),
        (json.dumps({"messages": [_user("a"), _user("b"), _assistant("c")]}), "one turn of the user"),
        (json.dumps({"messages": [_user("a"), _assistant("b"), _assistant("c")]}), "one turn of the user"),
        (json.dumps({"messages": [_user("a"), _assistant("b"), _user("c")]}), "one turn of the user"),
        (json.dumps({"messages": [_assistant("b")]}), "one turn of the user"),
        (json.dumps({"messages": [_user("a")]}), "one turn of the user"),
        (json.dumps({"messages": []}), "one turn of the user"),
    ],
)
def test_a_line_of_another_form_is_refused_by_its_number(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    file = _write(tmp_path, json.dumps(FORMS[0]), line)
    with pytest.raises(ValueError, match=rf"line 2 of '.*shown\.jsonl'.*{complaint}"):
        read_demonstrations(file)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_demonstrations(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="holds no demonstrations"):
        read_demonstrations(_write(tmp_path, ""))


@pytest.mark.parametrize("count", [1, 3, 5, 7, 12])
def test_every_pass_shows_each_demonstration_once_in_another_order(count: int) -> None:
    rows = [Demonstration(str(i), "") for i in range(5)]
    stream: list[str] = []
    for step in range(30):
        batch = draw_in_passes(rows, step=step, count=count, seed=0)
        assert len(batch) == count
        stream += [row.question for row in batch]
    passes = [stream[i : i + 5] for i in range(0, len(stream) - 4, 5)]
    assert all(Counter(one) == Counter("01234") for one in passes)
    assert len(set(map(tuple, passes))) > 1
    again = draw_in_passes(rows, step=7, count=count, seed=0)
    assert [row.question for row in again] == stream[7 * count : 8 * count]
