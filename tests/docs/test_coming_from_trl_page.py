"""docs/coming_from_trl.md names every field of TRL's GRPOConfig once, and fields of ours that are there."""

import dataclasses
import re
from typing import Any

import pytest

from grpo_pl.config.suggestions import NAMES
from grpo_pl.training.checks import check_precision
from tests.docs.pages import page

ROWS = re.findall(r"^\| (`.*?) \| (.*) \|$", page("coming_from_trl"), re.MULTILINE)
THEIRS = {name: ours for names, ours in ROWS for name in re.findall(r"`(\w+)`", names)}


def test_every_field_of_theirs_has_its_place() -> None:
    trl = pytest.importorskip("trl", reason="TRL is a development dependency: pip install 'grpo_pl[dev]'")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    named = [name for names, _ in ROWS for name in re.findall(r"`(\w+)`", names)]
    assert len(named) == len(set(named))
    assert set(named) == fields


def test_every_field_of_ours_is_an_option(command_line: Any) -> None:
    options = set(re.findall(r"--([\w.]+)", command_line("fit", "--help", "all").out))
    named = {
        name for _, ours in ROWS for name in re.findall(r"`((?:model|data|trainer|checkpoint|samples)\.[\w.]+)", ours)
    }
    inside = {name.split(".init_args")[0] for name in named}
    assert sorted(inside - options) == []


def test_the_page_agrees_with_the_hints_of_the_command_line() -> None:
    for name, ours in NAMES.items():
        if name in THEIRS and not ours.startswith(("nothing", "fields of", "--config", "model.engine")):
            if THEIRS[name].startswith("nothing"):
                continue  # in training, which is what TRL's field is for
            for first in re.findall(r"[a-z_]+(?:\.[a-z_]+)+|^\w+$", ours)[:1]:
                assert first.split(".init_args")[0] in THEIRS[name], name


def test_every_precision_that_the_page_offers_is_taken() -> None:
    offered = re.findall(r"\w+-(?:mixed|true)", THEIRS["fp16"])
    assert "bf16-mixed" in offered and THEIRS["bf16"] == THEIRS["fp16"]
    for precision in offered:
        check_precision(precision)
