"""Questions from data sets of the hub: a server on this machine plays the hub, and other processes read from it."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.hub import hub_of

ALONE = "import datasets; datasets.config.USE_PARQUET_EXPORT = False"  # else it looks for a further server, by name
READ = f"""
{ALONE}
import json, sys
from grpo_pl.data.tables import TablePrompts
for asked in json.loads(sys.argv[1]):
    try:
        found = [problem.answer for problem in TablePrompts(val_share=0, **asked).problems("train")]
    except ValueError as error:
        found = str(error)
    print("=" + json.dumps(found))
"""
WRITTEN = ["0.10", "007", "1e5", "2024-01-01", "true", "+7", "NA", "12345678901234567890", "1.0", "-0"]
LITERALS = ["0.10", "1.0", "1e5", "12345678901234567890", "true", '"2024-01-01"', '"+7"', '"007"', "-0", "1E-3"]
TOLD = [literal.strip('"') for literal in LITERALS]


def _csv(golds: Sequence[str], mark: str = ",") -> bytes:
    return "".join(f"{q}{mark}{gold}\n" for q, gold in [("question", "answer"), *enumerate(golds)]).encode()


def _json(golds: Sequence[str]) -> bytes:
    return "".join(f'{{"question": "q {q}", "answer": {gold}}}\n' for q, gold in enumerate(golds)).encode()


def _parquet() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": [Decimal("1.50"), Decimal("7.00")]}), file)
    return file.getvalue()


def _run(code: str, argument: str, home: Path, url: str, **settings: str) -> list[str]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "GRPO_PL_CACHE": str(home / "ours")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*", **settings}
    done = subprocess.run([sys.executable, "-c", code, argument], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def _read(asked: Sequence[Mapping[str, Any]], home: Path, url: str, **settings: str) -> list[Any]:
    """The golds, or the message, for each of these arguments, as a process of its own reads them."""
    lines = _run(READ, json.dumps(asked), home, url, **settings)
    return [json.loads(line[1:]) for line in lines if line.startswith("=")]


CARD = b"""---
configs:
- config_name: sums
  data_files: [{split: train, path: sums/part-*.csv}, {split: test.hard, path: sums/test.csv}]
  sep: ;
- config_name: others
  data_files: [{split: train, path: others.jsonl}]
dataset_info:
- config_name: sums
  features: [{name: question, dtype: int64}, {name: answer, dtype: float64}]
- config_name: others
  features: [{name: question, dtype: string}, {name: answer, dtype: string}]
---
"""
CARD_FILES = {
    "README.md": CARD,
    "sums/part-0.csv": _csv(["007", "1.50"], ";"),
    "sums/part-1.csv": _csv(["+1", "0.10"], ";"),
    "sums/test.csv": _csv(["1e5"], ";"),
    "others.jsonl": _json(["0.10", "1.0"]),
}


def test_golds_of_text_files_of_the_hub_stay_as_they_are_written_with_and_without_network(tmp_path: Path) -> None:
    sets = {
        "me/csv": {"README.md": b"# sums\n", "train.csv": _csv(WRITTEN), "test.csv": _csv(["00"])},
        "me/tsv": {"data/train-0.tsv": _csv(WRITTEN[:5], "\t"), "data/train-1.tsv": _csv(WRITTEN[5:], "\t")},
        "me/packed": {"train.csv.gz": gzip.compress(_csv(WRITTEN)), "notes.txt": b"nothing"},
        "me/lines": {"train.jsonl": _json(LITERALS)},
        "me/packed_lines": {"train.jsonl.gz": gzip.compress(_json(LITERALS))},
        "me/array": {"train.json": b"[" + b",".join(_json(LITERALS).splitlines()) + b"]"},
        "me/typed": {"train.parquet": _parquet()},
        "me/card": CARD_FILES,
    }
    asked: list[tuple[dict[str, str], list[str]]] = [
        *(({"path": f"me/{name}"}, WRITTEN) for name in ("csv", "tsv", "packed")),
        *(({"path": f"me/{name}"}, TOLD) for name in ("lines", "packed_lines", "array")),
        ({"path": "me/csv", "train_split": "test+train[1:3]"}, ["00", "007", "1e5"]),
        ({"path": "me/typed"}, ["1.50", "7.00"]),
        ({"path": "me/card", "subset": "sums"}, ["007", "1.50", "+1", "0.10"]),
        ({"path": "me/card", "subset": "sums", "train_split": "test.hard"}, ["1e5"]),
        ({"path": "me/card", "subset": "others"}, ["0.10", "1.0"]),
    ]
    arguments, expected = zip(*asked, strict=True)
    wrong = [{"path": "me/none"}, {"path": "me/card"}, {"path": "me/card", "subset": "x"}]
    wrong.append({"path": "me/lines", "train_split": "nosplit"})
    with hub_of({name: [files] for name, files in sets.items()}) as url:
        *golds, unknown, lacking, subset, split = _read([*arguments, *wrong], tmp_path, url)
        assert golds == list(expected)
        assert _read(arguments, tmp_path, url, HF_DATASETS_OFFLINE="1") == list(expected)
    assert "'me/none' doesn't exist" in unknown and "'sums', 'others'" in lacking
    assert "nosplit" in split and "'train'" in split and "'x' not found" in subset
    assert _read(arguments, tmp_path, url, HF_HUB_OFFLINE="1") == list(expected)


def _removed(home: Path, name: str) -> None:
    """Takes from the hub's cache a file, or all of a data set."""
    (found,) = home.glob(f"hub/datasets--{name}")
    shutil.rmtree(found) if found.is_dir() else found.unlink()


def test_without_network_the_latest_commit_is_read_if_all_its_files_are_here(tmp_path: Path) -> None:
    first, second = {"train.jsonl": _json(["1.0"])}, {"train.jsonl": _json(["2.0"])}
    with hub_of({"me/set": [first]}) as url:
        assert _read([{"path": "me/set"}], tmp_path, url) == [["1.0"]]
    asked = [{"path": "me/set"}, {"path": "me/card", "subset": "sums"}]
    with hub_of({"me/set": [first, second], "me/card": [CARD_FILES]}) as url:
        assert _read(asked, tmp_path, url) == [["2.0"], ["007", "1.50", "+1", "0.10"]]
    _removed(tmp_path, "me--card/snapshots/*/sums/part-1.csv")
    whole, cut = _read(asked, tmp_path, url)  # nobody listens there any more
    assert whole == ["2.0"] and "sums/part-1.csv" in cut and "\n" not in cut


def test_files_that_other_programs_fetched_are_read_and_a_table_without_its_text_files_is_not(tmp_path: Path) -> None:
    texts = {"train-0.csv": _csv(["0.10"]), "train-1.csv": _csv(["1.50"])}
    typed = {"train.parquet": _parquet()}
    sets = {"me/whole": texts, "me/cut": texts, "me/table": texts, "me/whole_typed": typed, "me/typed": typed}
    fetch = f"{ALONE}; import json, sys; [datasets.load_dataset(name) for name in json.loads(sys.argv[1])]"
    with hub_of({name: [files] for name, files in sets.items()}) as url:
        _run(fetch, json.dumps(list(sets)), tmp_path, url)
    for name in ("me--cut/snapshots/*/train-1.csv", "me--table", "me--typed"):
        _removed(tmp_path, name)
    whole, cut, table, *read = _read([{"path": name} for name in sets], tmp_path, url, HF_HUB_OFFLINE="1")
    assert whole == ["0.10", "1.50"] and read == [["1.50", "7.00"]] * 2
    for line, name in ((cut, "me/cut"), (table, "me/table")):
        assert f"hf download --repo-type dataset {name}" in line and "\n" not in line


def test_text_whose_types_would_be_guessed_is_refused_in_one_line_on_the_hub_and_in_a_folder(tmp_path: Path) -> None:
    def card(**settings: Any) -> bytes:
        return f"---\nconfigs: {json.dumps([{'config_name': 'a', 'data_files': '*.*', **settings}])}\n---\n".encode()

    nested = b'{"data": [{"question": "a", "answer": 1.50}]}'
    refused: list[tuple[str, dict[str, bytes]]] = [
        ("names: ", {"README.md": card(column_names=["question", "answer"]), "train.csv": b"a,007\n"}),
        ("field: ", {"README.md": card(field="data"), "train.json": nested}),
        ("sep: ", {"README.md": card(sep=r"\s+"), "train.csv": b"question answer\na 007\n"}),
        ("train.jsonl.bz2", {"train.jsonl.bz2": b""}),
    ]
    read = card(encoding="utf-8", keep_default_na=False, sep="|")
    fine = {"README.md": read, "train.csv": _csv(["007"], "|")}
    sets = {f"me/set-{number}": files for number, (_, files) in enumerate([*refused, ("", fine)])}
    for name, files in sets.items():
        (tmp_path / name).mkdir(parents=True)
        for file, raw in files.items():
            (tmp_path / name / file).write_bytes(raw)
    asked = [{"path": path} for path in (*sets, *(str(tmp_path / name) for name in sets))]
    with hub_of({name: [files] for name, files in sets.items()}) as url:
        told = _read(asked, tmp_path / "home", url)
    for *lines, golds in (told[: len(sets)], told[len(sets) :]):
        assert golds == ["007"]
        for (word, _), line in zip(refused, lines, strict=True):
            assert word in line and "types are guessed" in line and "\n" not in line
