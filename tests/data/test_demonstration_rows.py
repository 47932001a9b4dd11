"""Rows of demonstrations: their forms, the formats of files, what is held out, and rows that cannot be learned from."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_pl.data.demonstration_rows import DemonstrationRows, SortedRows
from grpo_pl.data.demonstrations import Demonstration

USER, SYSTEM = {"role": "user", "content": "1+1="}, {"role": "system", "content": "Add."}
ASSISTANT, TOOL = {"role": "assistant", "content": "2"}, {"role": "tool", "content": "3"}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}


def _file(folder: Path, *rows: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _sorted(rows: DemonstrationRows, **faults: str) -> SortedRows:
    """``faults``: completion -> what is wrong with it."""
    return rows.sort(lambda shown: [faults.get(each.completion) for each in shown])


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "1+1=", "completion": "2", "more": 5}, Demonstration("1+1=", "2")),
        ({"prompt": [USER], "completion": [ASSISTANT], "messages": None}, Demonstration("1+1=", "2")),
        ({"prompt": [SYSTEM, USER], "completion": "2"}, Demonstration((SYSTEM, USER), "2")),
        # what the assistant says in a prompt is no part of the completion
        ({"prompt": [USER, ASSISTANT, USER], "completion": "2"}, Demonstration((USER, ASSISTANT, USER), "2")),
        ({"messages": [USER, ASSISTANT]}, Demonstration("1+1=", "2")),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, Demonstration("1+1=", "2", (("1+1=", "2"),))),
        ({"messages": [USER, ASSISTANT, TOOL, ASSISTANT]}, Demonstration("1+1=", "2", (([TOOL], "2"),))),
        ({"prompt": "1+1=", "completion": "2", "tools": [SCHEMA]}, Demonstration("1+1=", "2", tools=(SCHEMA,))),
        ({"prompt": "1", "completion": "2", "tools": json.dumps([SCHEMA])}, Demonstration("1", "2", tools=(SCHEMA,))),
    ],
)
def test_the_forms_of_a_row(tmp_path: Path, row: dict[str, Any], shown: Demonstration) -> None:
    rows = DemonstrationRows(path=_file(tmp_path, row), val_share=0)
    assert list(_sorted(rows).numbers["train"]) == [0] and rows.read("train", [0]) == [shown]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1"}, "no completion"),
        ({"prompt": "1", "completion": None}, "no completion"),
        ({"question": "1", "answer": "2"}, "its columns are prompt, completion, question, answer"),
        ({"prompt": "1", "completion": ""}, "empty"),
        ({"prompt": "1", "completion": " \n"}, "empty"),
        ({"prompt": "1", "completion": []}, "found []"),
        ({"prompt": "1", "completion": 2}, "got 2"),
        ({"prompt": 1.5, "completion": "2"}, "got 1.5"),
        ({"prompt": ["1"], "completion": "2"}, "list of messages"),
        ({"prompt": [{"role": "user", "content": None}], "completion": "2"}, "role and content"),
        ({"prompt": "1", "completion": [USER]}, "found ['user']"),
        ({"prompt": [USER, ASSISTANT], "completion": "2"}, "message of the user"),
        ({"messages": [USER]}, "found []"),
        ({"messages": [USER, ASSISTANT, USER]}, "found ['assistant', 'user']"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "found ['assistant', 'assistant']"),
        ({"messages": [USER, {**ASSISTANT, "content": ""}]}, "empty"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [SCHEMA]}]}, "tool_calls"),
        ({"prompt": "1", "completion": "2 \ud83d"}, "half a surrogate pair"),
        ({"prompt": "1", "completion": "2", "tools": "add"}, "tools"),
    ],
)
def test_a_bad_row_is_named_with_its_file_or_left_out(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    path = _file(tmp_path, {"prompt": "1", "completion": "2"}, row, {"prompt": "3", "completion": "4"})
    with pytest.raises(ValueError) as refused:
        _sorted(DemonstrationRows(path=path, val_share=0))
    assert told in str(refused.value) and f"1 of 3 rows of {path!r}" in str(refused.value)
    assert "row 1: " in str(refused.value) and "\n" not in str(refused.value)
    left = _sorted(DemonstrationRows(path=path, val_share=0, bad_rows="drop"))
    assert list(left.numbers["train"]) == [0, 2] and told in left.notes[0]


def test_what_the_model_cannot_learn_is_told_in_the_same_way(tmp_path: Path) -> None:
    path = _file(tmp_path, *({"prompt": str(i), "completion": "long" if i == 4 else "2"} for i in range(6)))
    with pytest.raises(ValueError, match=r"1 of 6 rows of .*rows\.jsonl.* \(row 4: too long\)"):
        _sorted(DemonstrationRows(path=path), long="too long")


def test_a_line_that_is_no_json_and_a_file_that_is_empty_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, told in (('{"prompt": "1", "completion": "2"}\n{"prompt"\n', r"line 2 of .*rows\.jsonl"), ("", "empty")):
        file.write_text(text)
        with pytest.raises(ValueError, match=told):
            _sorted(DemonstrationRows(path=str(file)))
    with pytest.raises(ValueError, match="there is no file"):
        _sorted(DemonstrationRows(path=str(tmp_path / "others.jsonl")))


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv")
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    others = (str(tmp_path / name) for name in ("rows.parquet", "rows.csv", "saved", "rows.json"))
    paths = [_file(tmp_path, *rows), *others]
    for path in paths:
        source = DemonstrationRows(path=path, val_share=0)
        found = _sorted(source)
        assert source.read("train", found.numbers["train"]) == [Demonstration(f"{i}+1=", f"{i + 1}") for i in range(5)]
        assert source.read("train", [3, 1]) == [Demonstration("3+1=", "4"), Demonstration("1+1=", "2")]


def test_conversations_of_a_typed_table(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"messages": [SYSTEM, USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}])
    table.to_parquet(tmp_path / "rows.parquet")
    source = DemonstrationRows(path=str(tmp_path / "rows.parquet"), val_share=0)
    assert source.read("train", _sorted(source).numbers["train"]) == [
        Demonstration((SYSTEM, USER), "2"),
        Demonstration("1+1=", "2"),
    ]


def test_rows_with_equal_prompts_are_held_out_together(tmp_path: Path) -> None:
    path = _file(tmp_path, *({"prompt": str(i // 2), "completion": f"c{i}"} for i in range(200)))
    numbers = _sorted(DemonstrationRows(path=path, val_share=0.3)).numbers
    assert sorted([*numbers["train"], *numbers["val"]]) == list(range(200))
    assert {n // 2 for n in numbers["train"]}.isdisjoint(n // 2 for n in numbers["val"])
    assert 30 <= len(numbers["val"]) <= 90  # 60 expected, in pairs: a deviation of 9
    assert _sorted(DemonstrationRows(path=path, val_share=0)).numbers["val"].tolist() == []  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="val_share"):
        _sorted(DemonstrationRows(path=path, val_share=1e-9))


def test_prompts_of_a_further_file_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    val = _file(tmp_path / "val", {"prompt": "2", "completion": "held out"})
    path = _file(tmp_path, *({"prompt": str(i), "completion": "c"} for i in range(4)))
    source = DemonstrationRows(path=path, val_path=val)
    found = _sorted(source)
    assert list(found.numbers["train"]) == [0, 1, 3] and list(found.numbers["val"]) == [0]
    assert source.read("val", [0]) == [Demonstration("2", "held out")] and "1 training rows" in found.notes[0]
