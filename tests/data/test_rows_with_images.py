"""Problems of rows with images: from every kind of file, in messages or beside them, and what is refused."""

import base64
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from grpo_pl.config.objects import build
from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.overlap import find_overlaps
from grpo_pl.data.rows import RowPrompts
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tables import TablePrompts
from grpo_pl.extras.images.picture import Picture, read_picture
from grpo_pl.types import Problem

Write = Callable[..., str]
KINDS: list[type[RowPrompts]] = [JsonLinesPrompts, TablePrompts]
each = pytest.mark.parametrize("kind", KINDS)
COLORS = ["red", "green", "blue", "white"]


def _png(color: str, size: tuple[int, int] = (2, 2)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def _url(color: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(_png(color)).decode()}"


PICTURES = {c: read_picture(_png(c), folder=None, limits=ImageLimits(), where="") for c in COLORS}
NAMES = {picture: color for color, picture in PICTURES.items()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with ``red.png``, ``green.png`` …"""
    for color in COLORS:
        (tmp_path / f"{color}.png").write_bytes(_png(color))
    return tmp_path


def _problems(source: PromptSource) -> list[Problem]:
    found = source.problems("train")
    assert found is not None
    return list(found)


def _colors(problem: Problem) -> list[str]:
    assert isinstance(problem.columns["images"], tuple) and "image" not in problem.columns
    return [NAMES[picture] for picture in problem.columns["images"]]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "embedded.parquet", "saved", "folder"])
def test_every_kind_of_file_gives_the_same_images(files: Path, suffix: str) -> None:
    rows = [{"question": f"{c}?", "answer": c, "image": f"{c}.png", "level": i} for i, c in enumerate(COLORS)]
    path = files / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    elif suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif suffix == "folder":
        path.mkdir()
        for color in COLORS:
            (path / f"{color}.png").write_bytes(_png(color))
        lines = [{"file_name": row.pop("image"), **row} for row in rows]
        (path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        images = [{"bytes": _png(c), "path": None} for c in COLORS]
        table = datasets.Dataset.from_list([row | {"image": image} for row, image in zip(rows, images, strict=True)])
        table = table.cast_column("image", datasets.Image())
        if suffix == "saved":
            table.save_to_disk(str(path))
        else:
            table.to_parquet(path)
    source = TablePrompts(path=str(path), images=True, val_share=0)
    found = [(p.question, p.answer, _colors(p), str(p.columns["level"]), p.messages) for p in _problems(source)]
    assert sorted(found) == sorted((f"{c}?", c, [c], str(i), None) for i, c in enumerate(COLORS))


def test_of_a_column_of_lists_each_image_is_read(files: Path) -> None:
    table = datasets.Dataset.from_list(
        [
            {"question": "two?", "answer": "2", "images": [{"bytes": _png(c), "path": None} for c in ("red", "blue")]},
            {"question": "none?", "answer": "0", "images": []},
            {"question": "one?", "answer": "1", "images": [{"bytes": _png("green"), "path": None}]},
        ]
    )
    table.cast_column("images", datasets.List(datasets.Image())).to_parquet(files / "rows.parquet")
    source = TablePrompts(path=str(files / "rows.parquet"), images=True, val_share=0)
    assert [_colors(problem) for problem in _problems(source)] == [["red", "blue"], [], ["green"]]


def _said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


MARK = {"type": "image"}
HERE = {"role": "user", "content": "Here."}
MESSAGES: dict[str, tuple[list[Any], dict[str, Any], list[Any], list[str], str]] = {
    # the cell, further columns, the messages, the images, the question
    "TRL: places for a column": (
        [_said(MARK, _text("or"), MARK, _text("?"))],
        {"images": ["red.png", "blue.png"]},
        [_said(MARK, _text("or"), MARK, _text("?"))],
        ["red", "blue"],
        "or\n?",
    ),
    "TRL: in the part": (
        [_said({"type": "image", "image": "red.png"}, _text("?"))],
        {},
        [_said(MARK, _text("?"))],
        ["red"],
        "?",
    ),
    "OpenAI": (
        [_said(_text("?"), {"type": "image_url", "image_url": {"url": _url("green"), "detail": "low"}})],
        {},
        [_said(_text("?"), MARK)],
        ["green"],
        "?",
    ),
    "both, with nulls of a table": (
        [_said(MARK | {"text": None, "image": None}, {"type": "image_url", "image_url": _url("blue"), "text": None})],
        {"image": "red.png"},
        [_said(MARK, MARK)],
        ["red", "blue"],
        "",
    ),
    "no place: the user's first turn": (
        [{"role": "system", "content": "Look."}, HERE, {"role": "assistant", "content": "Yes."}, _said(_text("?"))],
        {"images": ["white.png", "red.png"]},
        [
            {"role": "system", "content": "Look."},
            _said(MARK, MARK, _text("Here.")),
            {"role": "assistant", "content": "Yes."},
            _said(_text("?")),
        ],
        ["white", "red"],
        "user: Here.\n\nassistant: Yes.\n\nuser: ?",
    ),
    "several turns": (
        [_said(MARK, _text("a")), {"role": "assistant", "content": "b"}, _said(_text("c"), MARK)],
        {"images": ["red.png", "green.png"]},
        [_said(MARK, _text("a")), {"role": "assistant", "content": "b"}, _said(_text("c"), MARK)],
        ["red", "green"],
        "user: a\n\nassistant: b\n\nuser: c",
    ),
    "no images": ([HERE], {"images": None}, [HERE], [], "Here."),
}


@each
def test_messages_keep_the_places_of_their_images(kind: type[RowPrompts], files: Path, jsonl: Write) -> None:
    rows = [{"prompt": cell, "answer": "1", **more} for cell, more, *_ in MESSAGES.values()]
    found = _problems(kind(path=jsonl(rows), images=True, val_share=0))
    for problem, (_, _, messages, colors, question) in zip(found, MESSAGES.values(), strict=True):
        assert list(map(dict, problem.messages or ())) == messages
        assert (_colors(problem), problem.question) == (colors, question)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"image": "gone.png"}, "gone.png"),
        ({"image": "https://example.org/a.png"}, "https://example.org/a.png"),
        ({"images": ["red.png", "../out.png"]}, "image 2, file '../out.png'"),
        ({"image": "empty.png"}, "empty.png"),
        ({"image": "red.png", "images": ["red.png"]}, "both"),
        ({"images": ["red.png"] * 3}, "2"),
        ({"image": {"url": "red.png"}}, "dict"),
        ({"question": [_said(MARK)]}, "0"),
        ({"question": [_said(_text("a"), MARK)], "images": ["red.png"] * 2}, "1 of the 2"),
        ({"question": [_said(_text(" "))], "image": None}, "neither text nor image"),
        ({"question": [_said({"type": "audio"})]}, "audio"),
        ({"question": [_said({"type": "text"})]}, "text"),
        ({"question": [_said("bare")]}, "bare"),
        ({"question": [_said({"type": "image", "url": "red.png"})]}, "red.png"),
        ({"question": [_said(MARK, role="system"), HERE], "image": "red.png"}, "system"),
        ({"question": [_said({"type": "image_url", "image_url": {"url": "http://a/b"}})]}, "http://a/b"),
        ({"question": "", "image": "red.png"}, "question"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_before_the_run(
    row: dict[str, Any], named: str, files: Path, jsonl: Write
) -> None:
    (files / "empty.png").touch()
    (files.parent / "out.png").write_bytes(_png("red"))
    good = {"question": "?", "answer": "1", "image": "red.png"}
    path = jsonl([good, {"question": "!", "answer": "2", **row}])
    limits = ImageLimits(per_prompt=2)
    for kind, number in ((JsonLinesPrompts, "line 2"), (TablePrompts, "row 1")):
        with pytest.raises(ValueError) as error:
            kind(path=path, images=limits).problems("train")
        assert number in str(error.value) and path in str(error.value) and named in str(error.value)
        assert "\n" not in str(error.value)
    source = TablePrompts(path=path, images=limits, bad_rows="drop", val_share=0)
    assert [p.question for p in _problems(source)] == ["?"] and named in source.notes[0]


def test_rows_without_any_image_and_images_without_the_setting_are_refused(files: Path, jsonl: Write) -> None:
    path = jsonl([{"question": "?", "answer": "1", "picture": "red.png"}])
    with pytest.raises(ValueError, match="images"):
        TablePrompts(path=path, images=True).problems("train")
    path = jsonl([{"question": [_said(MARK, _text("?"))], "answer": "1", "image": "red.png"}])
    with pytest.raises(ValueError, match=r"data\.source\.images"):
        TablePrompts(path=path).problems("train")


def test_another_folder_may_hold_the_files(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    for given in ("red.png", str(files / "red.png")):
        elsewhere.write_text(json.dumps({"question": "?", "answer": "1", "image": given}))
        with pytest.raises(ValueError, match=r"red\.png"):
            TablePrompts(path=str(elsewhere), images=True).problems("train")
        source = TablePrompts(path=str(elsewhere), images=ImageLimits(folder=str(files)), val_share=0)
        assert [_colors(problem) for problem in _problems(source)] == [["red"]]


def test_a_text_run_reads_the_columns_as_they_are_and_loads_nothing_of_it(files: Path, jsonl: Write) -> None:
    path = jsonl([{"question": "?", "answer": "1", "image": "gone.png", "images": [1]}])
    (problem,) = _problems(TablePrompts(path=path, val_share=0))
    assert dict(problem.columns) == {"image": "gone.png", "images": [1]}
    assert "images" not in TablePrompts(path=path).init_args()  # by which caches are named
    assert TablePrompts(path=path, images=True).init_args()["images"] is True
    code = f"""
import sys
from grpo_pl.data.tables import TablePrompts
TablePrompts(path={path!r}, val_share=0).problems('train')[0]
print([m for m in sys.modules if m.startswith(('PIL', 'grpo_pl.extras.images'))])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "row",
    [
        lambda image: {"question": "?", "image": image},
        lambda image: {"question": [_said({"type": "image", "image": image}, _text("?"))]},
        lambda image: {"prompt": [_said(_text("?"), {"type": "image_url", "image_url": {"url": image}})]},
        lambda image: {"question": [_said(MARK, {"type": "image", "image": image})], "images": [_url("white")]},
    ],
)
def test_the_digest_is_of_pixels(row: Callable[[str], dict[str, Any]], files: Path, jsonl: Write) -> None:
    def digest(image: Any) -> str:
        path = jsonl([{**row(image), "answer": "1"}])
        return TablePrompts(path=path, images=True, val_share=0).digests()["train"]

    by_path = digest("red.png")
    assert digest(_url("red")) == by_path != digest("blue.png")
    (files / "red.png").write_bytes(_png("blue"))
    assert digest("red.png") == digest("blue.png")


def test_what_is_asked_of_other_pixels_is_another_problem(files: Path, jsonl: Write) -> None:
    rows = [{"question": "Which?", "answer": c, "image": f"{c}.png"} for c in COLORS]
    source = TablePrompts(path=jsonl(rows), images=True, val_share=0.5, seed=1)
    train, held_out = _problems(source), source.validation()
    assert len(train) + len(held_out) == 4 and train and held_out
    assert not find_overlaps(train, {"val": held_out})["val"].repeated
    assert find_overlaps([*train, held_out[0]], {"val": held_out})["val"].repeated == held_out[:1]
    again = jsonl([*rows, {"question": " which? ", "answer": "x", "image": _url(held_out[0].answer)}], "again.jsonl")
    more = TablePrompts(path=again, images=True, val_share=0.5, seed=1)
    assert len(more.validation()) == len(held_out) + 1  # equal rows are on one side


def test_long_questions_in_equal_words_are_no_near_copies(files: Path, jsonl: Write) -> None:
    words = "how many of the small round things in this picture are of a colour like"
    problems = _problems(
        TablePrompts(
            path=jsonl([{"question": f"{words} {c}?", "answer": "1", "image": f"{c}.png"} for c in COLORS]),
            images=True,
            val_share=0,
        )
    )
    assert not find_overlaps(problems[:2], {"val": problems[2:]})["val"].alike


def test_an_image_that_changes_during_the_run_is_noticed(files: Path, jsonl: Write) -> None:
    source = TablePrompts(path=jsonl([{"question": "?", "answer": "1", "image": "red.png"}]), images=True, val_share=0)
    assert _colors(source.prompts(0, count=1)[0]) == ["red"]
    (files / "red.png").unlink()
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        source.prompts(1, count=1)


def test_a_mixture_and_other_processes_keep_the_images(files: Path, jsonl: Write) -> None:
    part = TablePrompts(path=jsonl([{"question": "?", "answer": "1", "image": "red.png"}]), images=True, val_share=0)
    (problem,) = MixturePrompts(parts={"seen": part}).prompts(0, count=1)
    assert _colors(pickle.loads(pickle.dumps(problem))) == ["red"]
    assert isinstance(problem.columns["images"][0], Picture)


@pytest.mark.parametrize("given", [True, {"megabytes": 2, "per_prompt": 3}])
def test_yaml_says_what_is_read(given: Any) -> None:
    spec = {"class_path": "TablePrompts", "init_args": {"path": "rows.jsonl", "images": given}}
    source = build(PromptSource, spec, "data.source")
    assert isinstance(source, TablePrompts)
    assert source.image_limits == (ImageLimits() if given is True else ImageLimits(megabytes=2, per_prompt=3))
    assert TablePrompts(path="rows.jsonl").image_limits is None
