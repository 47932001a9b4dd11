"""``grpo-pl evaluate``: what is refused before the first question is asked. Its results are tested with the server."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.commands.evaluate import evaluate, read_problems
from tests.images import picture


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output": "problems.jsonl"}, "output problems.jsonl is the input file"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"max_batch_size": -4}, "--max_batch_size must be at least 1, got -4"),
        ({"n": 99}, r"^--n: Input should be less than or equal to 64\.$"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '{"problem": "1+1=", "answer": "2"}\n'
    Path("problems.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate(data="problems.jsonl", model="not asked for", **given)
    assert Path("problems.jsonl").read_text() == text


LARGE = "data:image/png;base64," + 14_000_000 * "A"


@pytest.mark.parametrize(
    ("images", "given", "says"),
    [
        (True, {"problem": "?", "images": ["a.png"] * 9}, "more than 8 images: the limit of --data"),
        (True, {"problem": "?", "image": LARGE}, "10 megabytes: the limit of --data"),
        (True, {"problem": "?", "image": "../a.png"}, "move it there, beside the file"),
        (False, {"problem": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "column image"),
    ],
)  # fmt: skip
def test_images_that_are_not_read_are_refused_by_what_the_user_gave(
    images: bool, given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(picture(0).png)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"answer": "1", **given}))
    with pytest.raises(ValueError, match=r"^row 1 of .*rows\.jsonl") as refused:
        read_problems(file, images=images)
    assert says in str(refused.value) and "data.source" not in str(refused.value)
