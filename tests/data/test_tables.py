"""Questions from tables of every kind of file: columns, splits by name, and what is refused in one line."""

import gzip
import random
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.tables import TablePrompts

GSM8K_PATTERN = r"####\s*(.+)"


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i} + {i}?", "answer": f"It is {i} + {i} = {2 * i}.\n#### {2 * i}", "level": i % 3}
        for i in range(count)
    ]


def test_the_answer_pattern_takes_the_last_match_and_other_columns_go_to_rewards(jsonl: Callable[..., str]) -> None:
    rows = [{"q": "6*7?", "a": "#### 1\nno, #### 42 ", "level": 3}, {"q": "1,000+1", "a": "#### 1,001", "level": 4}]
    source = TablePrompts(path=jsonl(rows), question="q", answer="a", answer_pattern=GSM8K_PATTERN, val_share=0)
    first, second = source.problems("train")
    assert (first.id, first.question, first.answer, dict(first.columns)) == (0, "6*7?", "42", {"level": 3})
    assert second.answer == "1,001"


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "jsonl", "tsv"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, suffix: str) -> None:
    table = datasets.Dataset.from_list(_rows(6))
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        table.to_parquet(file)
    elif suffix in ("csv", "tsv"):
        table.to_csv(file, sep="\t" if suffix == "tsv" else ",")
    else:
        table.to_json(file)
    source = TablePrompts(path=str(file), answer_pattern=GSM8K_PATTERN, val_share=0)
    assert [(p.id, p.question, p.answer) for p in source.problems("train")] == [
        (i, f"What is {i} + {i}?", str(2 * i)) for i in range(6)
    ]


def _answers(path: Path | str, **arguments: Any) -> list[str]:
    return [p.answer for p in TablePrompts(path=str(path), val_share=0, **arguments).problems("train")]


QS = "abcdefghij"
WRITTEN = ["007", "1.50", "123456789012345678901234567890", "NA", "None", "null", "2024-01-05", "1e5", "True", "-0"]
LITERALS = ["1.50", "1", "2.5", "123456789012345678901234567890", "1e5", "0.10", "1E-3", "true", "-0", "NaN"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV", "set/train.csv", "rows.csv.gz"])
def test_golds_of_a_csv_file_stay_as_they_are_written(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    mark = "\t" if "TSV" in name else ","
    text = "".join(
        mark.join(cells) + "\n" for cells in [("question", "answer", "level"), *zip(QS, WRITTEN, WRITTEN, strict=True)]
    )
    file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    source = TablePrompts(path=str(file.parent if "/" in name else file), val_share=0)
    problems = source.problems("train")
    assert [p.answer for p in problems] == WRITTEN == [p.columns["level"] for p in problems]
    file.write_text(f"question{mark}answer\na{mark}\nb{mark}7\n")
    if not name.endswith("gz"):
        assert _answers(source.path, bad_rows="drop") == ["7"]


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "X.JSONL", "rows.ndjson", "rows.jsonl.gz", "set/train.json"]
)
@pytest.mark.parametrize("form", ["lines", "array", "objects"])
def test_golds_of_a_json_file_stay_as_they_are_written(tmp_path: Path, name: str, form: str) -> None:
    if form == "objects" and not name.endswith(".json"):
        return  # a line of .jsonl is an object
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    rows = [f'{{"question": {n}.0, "answer": {gold},\f "more": [{{"x": {gold}}}]}}' for n, gold in enumerate(LITERALS)]
    rows = [row.replace("\f", "\n" if form != "lines" else "") for row in rows]
    text = {"lines": "\n".join(rows), "array": f"[{', '.join(rows)}]\n", "objects": "\n".join(rows)}[form]
    file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    source = TablePrompts(path=str(file.parent if "/" in name else file), val_share=0)
    problems = source.problems("train")
    assert [(p.id, p.question, p.answer) for p in problems] == [(n, f"{n}.0", gold) for n, gold in enumerate(LITERALS)]
    assert problems[1].columns == {"more": [{"x": 1}]}
    lines = JsonLinesPrompts(path=str(file), val_share=0)
    if form == "lines" and not name.endswith("gz"):
        assert [p.answer for p in lines.problems("train")] == LITERALS


TYPED: dict[str, tuple[Any, list[str]]] = {
    "decimal": (pa.array([Decimal("1.50"), Decimal("1E-8")], pa.decimal128(38, 8)), ["1.50000000", "0.00000001"]),
    "date": (pa.array([date(2024, 1, 5), date(1, 1, 1)]), ["2024-01-05", "0001-01-01"]),
    "microseconds": (
        pa.array([datetime(2024, 1, 5, 10), datetime(2024, 1, 5)]),
        ["2024-01-05 10:00:00", "2024-01-05 00:00:00"],
    ),
    "nanoseconds": (pa.array([1, 10**9], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:01"]),
    "zone": (pa.array([0, 1], pa.timestamp("s", tz="UTC")), ["1970-01-01 00:00:00+00:00", "1970-01-01 00:00:01+00:00"]),
    "time": (pa.array([time(10, 5), time(0)]), ["10:05:00", "00:00:00"]),
    "integer": (pa.array([2**53 + 1, 2**64 - 1], pa.uint64()), ["9007199254740993", "18446744073709551615"]),
    "float32": (pa.array([0.1, 16777216.0], pa.float32()), ["0.1", "16777216.0"]),
    "float64": (pa.array([0.1, 1e22]), ["0.1", "1e+22"]),
    "truth": (pa.array([True, False]), ["true", "false"]),
    "category": (pa.array(["007", "NA"]).dictionary_encode(), ["007", "NA"]),
    "numbers of categories": (pa.array([7, 8]).dictionary_encode(), ["7", "8"]),
    "large text": (pa.array(["007", "NA"], pa.large_string()), ["007", "NA"]),
}


@pytest.mark.parametrize("kind", TYPED)
def test_golds_of_a_table_with_types_are_written_out(tmp_path: Path, kind: str) -> None:
    column, expected = TYPED[kind]
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": column}), tmp_path / "rows.parquet")
    assert _answers(tmp_path / "rows.parquet") == expected


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([["1", "2"], ["3"]], r"row 0: answer \"\['1', '2'\]\", list; row 1: answer \"\['3'\]\", list"),
        ([{"x": 1}, {"x": 2}], "row 0: answer .*, dict"),
        ([b"1", b"2"], "row 0: answer .*, bytes"),
        ([None, timedelta(days=1)], "row 0: answer is null; row 1: answer '1 day, 0:00:00', timedelta"),
    ],
)
def test_a_cell_that_is_no_answer_is_named_with_row_column_and_type(tmp_path: Path, cells: Any, told: str) -> None:
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": cells}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=rf"2 of 2 rows of '.*rows\.parquet' .*\({told}\)"):
        _answers(tmp_path / "rows.parquet")


OF_KEYS = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize("kind", [OF_KEYS, pa.list_(OF_KEYS), pa.struct({"inner": OF_KEYS})], ids=str)
@pytest.mark.parametrize("folder", [False, True])
def test_a_column_whose_type_datasets_lacks_is_named(tmp_path: Path, kind: pa.DataType, folder: bool) -> None:
    rows = {"question": ["a", "b"], "answer": ["1", "2"], "more": pa.nulls(2, kind)}
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"cannot load [^\n]*'more' is of type [^\n]*map<string, int64[^\n]*$"):
        _answers(tmp_path if folder else tmp_path / "train.parquet")


def test_what_save_to_disk_wrote_is_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"question": "a", "answer": Decimal("1.50")}])
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "many"))
    assert _answers(tmp_path / "one") == ["1.50"]
    for split in ("train", "test"):
        assert _answers(tmp_path / "many", train_split=split) == ["1.50"]
    for name in ("one", "many"):
        with pytest.raises(ValueError, match="nosplit"):
            _answers(tmp_path / name, train_split="nosplit")


@pytest.mark.parametrize("kind", ["text", "saved", "parquet"])
def test_parts_of_splits_may_be_asked_for(jsonl: Callable[..., str], tmp_path: Path, kind: str) -> None:
    rows = [{"question": f"q {i}", "answer": str(i)} for i in range(12)]
    parts = {"train-0": rows[:4], "train-1": rows[4:8], "test": rows[8:]}
    if kind == "saved":
        splits = {"train": rows[:8], "test": rows[8:]}
        saved = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in splits.items()})
        saved.save_to_disk(str(tmp_path / "set"))
    for name, part in parts.items() if kind != "saved" else ():
        if kind == "text":
            jsonl(part, f"set/{name}.jsonl")
        else:
            (tmp_path / "set").mkdir(exist_ok=True)
            datasets.Dataset.from_list(part).to_parquet(str(tmp_path / "set" / f"{name}.parquet"))
    for split, answers in {
        "train[3:6]+test[:25%]": ["3", "4", "5", "8"],
        "train[:50%]": ["0", "1", "2", "3"],
        "train+test": [str(i) for i in range(12)],
        "all": [str(i) for i in range(12)],
    }.items():
        assert _answers(tmp_path / "set", train_split=split) == answers, split
    with pytest.raises(ValueError, match=r"cannot load the data set [^\n]*nosplit[^\n]*'train', 'test'[^\n]*$"):
        _answers(tmp_path / "set", train_split="nosplit")


def test_a_row_has_all_columns_of_the_table(jsonl: Callable[..., str]) -> None:
    path = jsonl([{"answer": 1, "level": 3}, {"question": "b", "answer": 2, "topic": "sums"}])
    (problem,) = TablePrompts(path=path, val_share=0, bad_rows="drop").problems("train")
    assert (problem.question, problem.columns) == ("b", {"level": None, "topic": "sums"})


def test_worked_completions_serve_as_demonstrations_and_never_reach_rewards(jsonl: Callable[..., str]) -> None:
    rows = [{**row, "solution": f"<answer>{row['level']}</answer>"} for row in _rows(4)]
    source = TablePrompts(path=jsonl(rows), val_share=0, worked="solution")
    prompt = source.problems("train")[2]
    assert source.demonstration(prompt, random.Random(0)) == "<answer>2</answer>"
    assert "solution" not in prompt.columns


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ('{"q": 1, "answer": 2}', {}, "has no column 'question'; its columns are q, answer."),
        ("", {}, "is empty"),
        ("not json", {}, "line 1 of .* is not JSON"),
        ('{"question": "a", "answer": "5"}', {"answer_pattern": GSM8K_PATTERN}, "1 of 1 rows .*row 0: answer '5'"),
        ('{"question": "a", "answer": null}', {}, "1 of 1 rows .*row 0: answer is null"),
        ('{"question": [{"role": "user"}], "answer": "5"}', {}, "1 of 1 rows"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, text: str, arguments: dict[str, Any], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        TablePrompts(path=str(file), val_share=0, **arguments).problems("train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"question": "a", "answer": "1"}\n{"question": "\xff", "answer": "1"}\n', "line 2 .* byte 14 is"),
        ("a.csv", b"question,answer\na,1\nb\xff,2\n", "line 3 .* byte 1 is"),
        ("set/train.json", b'[{"question": "a",\n"answer": "\xff"}]', "line 2 of '.*train.json' .* byte 11 is"),
    ],
)
def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name if "/" not in name else tmp_path / "set"
    with pytest.raises(ValueError, match=f"{place} 0xff"):
        TablePrompts(path=str(path), val_share=0).problems("train")


@pytest.mark.parametrize("path", ["nowhere.csv", "./nowhere", "/nowhere/at/all"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        TablePrompts(path=path).problems("train")


def test_a_folder_has_the_splits_that_its_files_are_named_after(jsonl: Callable[..., str], tmp_path: Path) -> None:
    jsonl(_rows(6), "set/train.jsonl")
    jsonl(_rows(8)[6:], "set/test.jsonl")
    source = TablePrompts(path=str(tmp_path / "set"), val_split="test", answer_pattern=GSM8K_PATTERN)
    assert [len(source.problems(split)) for split in ("train", "val")] == [6, 2]
    with pytest.raises(ValueError, match=r"cannot load the data set .*nosplit"):
        TablePrompts(path=str(tmp_path / "set"), val_split="nosplit").problems("train")
    card = "---\nconfigs: [{config_name: a, data_files: [{split: test.hard, path: test.jsonl}]}]\n---\n"
    (tmp_path / "set" / "README.md").write_text(card)
    assert _answers(tmp_path / "set", train_split="test.hard[:1]", answer_pattern=GSM8K_PATTERN) == ["12"]


def test_a_split_of_a_single_file_is_refused(jsonl: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="has no split 'test': set val_split null and give val_path or val_share"):
        TablePrompts(path=jsonl(_rows(6)), val_split="test").problems("train")


def test_a_pattern_that_begins_with_a_hash_is_no_comment_in_yaml(tmp_path: Path) -> None:
    from jsonargparse import ArgumentParser

    from grpo_pl.data.sources import PromptSource

    (tmp_path / "source.yaml").write_text(
        "source: {class_path: grpo_pl.data.tables.TablePrompts, init_args: {path: x, answer_pattern: '####\\s*(.+)'}}"
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(PromptSource, "source")
    for again in (
        parser.parse_args([f"--config={tmp_path}/source.yaml"]),
        parser.parse_string((tmp_path / "source.yaml").read_text()),
    ):
        dumped = parser.parse_string(parser.dump(again))  # as the run's config.yaml gives it back
        assert parser.instantiate(dumped).source.answer_pattern == GSM8K_PATTERN
