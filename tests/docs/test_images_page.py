"""docs/images.md: its rows are read as it says, its limits are the defaults, and its reward judges."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from grpo_pl.config.objects import build
from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.data.sources import PromptSource
from grpo_pl.rewards import ExactReward, FunctionReward
from tests.docs.pages import blocks, page

PAGE = page("images")


def _yaml(begin: str) -> Any:
    return yaml.safe_load(next(text for text in blocks(PAGE, "yaml") if text.lstrip().startswith(begin)))


def test_the_rows_of_the_page_are_read_and_its_reward_sees_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (rows,) = blocks(PAGE, "json")
    Path("rows.jsonl").write_text(rows)
    Path("photos").mkdir()
    for name, color in (("photos/17.jpg", "white"), ("a.png", "black"), ("b.png", "white")):
        Image.new("RGB", (4, 4), color).save(name)
    spec = _yaml("data:")["data"]["source"]
    spec["init_args"]["val_share"] = 0.0
    problems = build(PromptSource, spec, "data.source").problems("train")
    assert problems is not None
    assert [len(problem.columns["images"]) for problem in problems] == [1, 2, 1]
    assert [problem.question for problem in problems][2] == "Name it."
    code = next(text for text in blocks(PAGE, "python") if "bright_enough" in text)
    names: dict[str, Any] = {}
    exec(code, names)
    columns = {"images": [problem.columns["images"] for problem in problems]}
    scores = FunctionReward(function=names["bright_enough"])(["bright", "bright", "it is dark"], [""] * 3, columns)
    assert [score.value for score in scores] == [1.0, 0.0, 1.0]


def test_the_sets_of_shapes_are_what_the_page_says() -> None:
    data = yaml.safe_load(next(text for text in blocks(PAGE, "yaml") if "combinations" in text))["data"]
    sources = {"": data["source"], **data["validation_sets"]}
    sets = {name: build(PromptSource, spec, "data.source").validation(20) for name, spec in sources.items()}
    table = re.findall(r"^\| `(count|color|left)[^|]*\| `([^`]*)`", PAGE, re.MULTILINE)
    assert [name for name, _ in table] == ["count", "color", "left"]
    assert {name: len(problems) for name, problems in sets.items()} == {"": 20, "combinations": 20, "permuted": 20}
    assert [p.question for p in sets["permuted"]] == [p.question for p in sets[""]]
    for problems in (sets[""], sets["combinations"]):
        scores = ExactReward()([rf"\boxed{{{p.answer}}}" for p in problems], [p.answer for p in problems], {})
        assert all(score.value == 1.0 for score in scores)


def test_the_limits_of_the_page_are_the_defaults() -> None:
    assert _yaml("images:")["images"] == asdict(ImageLimits())
