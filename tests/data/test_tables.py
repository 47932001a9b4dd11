"""Questions from tables of every kind of file: columns, splits by name, and what is refused in one line."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

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


def test_golds_of_a_csv_file_stay_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("question,answer,level\na,007,1\nb,1.50,2\nc,,3\n")
    source = TablePrompts(path=str(file), val_share=0, bad_rows="drop")
    assert [(p.answer, p.columns["level"]) for p in source.problems("train")] == [("007", 1), ("1.50", 2)]


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
        ("", {}, "it is empty"),
        ("not json", {}, "JSON parse error"),
        ('{"question": "a", "answer": "5"}', {"answer_pattern": GSM8K_PATTERN}, "1 of 1 rows .*row 0: '5'"),
        ('{"question": "a", "answer": null}', {}, "1 of 1 rows .*row 0: 'None'"),
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
        ("set/train.json", b'[{"question": "a",\n"answer": "\xff"}]', "line 2 of 'train.json' .* byte 11 is"),
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
