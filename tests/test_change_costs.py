"""The counts of "What a change costs" in CONTRIBUTING.md, found by the files that name what is there already."""

import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import grpo_pl
from grpo_pl.functional.advantages import Baseline, Scale
from grpo_pl.functional.kl import Estimator
from grpo_pl.functional.losses import Aggregation, Mismatch, RatioLevel, Surrogate
from grpo_pl.objective.fields import BUDGET, Objective
from tests.rewards.shipped import SHIPPED

ROOT = Path(grpo_pl.__file__).parents[1]
FIELDS = [field.name for field in fields(Objective) if "_" in field.name and field.name not in BUDGET]
"""Without those whose names are words of English, which stand everywhere."""
CHOICES = sorted(
    {
        name
        for choices in (Baseline, Scale, Surrogate, RatioLevel, Aggregation, Estimator, Mismatch)
        for name in get_args(choices)
        if "_" in name
    }
)
METRICS = sorted(
    {
        key
        for file in (ROOT / "grpo_pl" / "objective").glob("*.py")
        for key in re.findall(r'stats\["([^"]+)"\] =', file.read_text())
        if "/" in key
    }
)


@cache
def texts(folder: str) -> dict[Path, str]:
    found = (file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md", ".csv", ".yaml"))
    return {file.relative_to(ROOT): file.read_text() for file in found}


def naming(name: str, *folders: str) -> list[str]:
    """The files in ``folders`` that hold ``name`` as a whole word."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    found = (item for folder in folders for item in texts(folder).items())
    return [str(file) for file, text in found if name in text and pattern.search(text)]


def test_a_field_of_the_objective_is_named_in_ten_files() -> None:
    for field in FIELDS:
        files = naming(field, "grpo_pl", "serve", "docs", "tests/config")
        without_tests = [file for file in files if not file.startswith("tests/") or file.endswith("presets.csv")]
        assert 2 <= len(without_tests) <= 10, (field, without_tests)


def test_a_preset_names_only_the_fields_that_differ() -> None:
    """So that a new field changes none of them."""
    rarely = [field for field in FIELDS if len(naming(field, "configs/algorithm")) <= 3]
    assert len(rarely) >= 0.8 * len(FIELDS)


def test_an_estimator_or_surrogate_is_named_in_five_files_of_code() -> None:
    named = {choice: naming(choice, "grpo_pl", "serve") for choice in CHOICES}
    assert {choice: files for choice, files in named.items() if len(files) > 5} == {}


NAMED_BY_OTHERS = {"CodeReward", "ColumnArithmeticReward", "MathReward", "PerSource"}
"""Rewards that messages and docstrings of other files speak of."""


def test_a_reward_is_named_in_its_own_file_and_in_the_package() -> None:
    for reward in sorted(SHIPPED.keys() - NAMED_BY_OTHERS):
        own = str(Path(*SHIPPED[reward].__module__.split(".")).with_suffix(".py"))
        assert sorted(naming(reward, "grpo_pl/rewards")) == sorted([own, "grpo_pl/rewards/__init__.py"])
        assert naming(reward, "docs/reference") == [], reward


def test_an_engine_is_named_in_two_files_outside_its_folder() -> None:
    for engine, folder in (("VLLMEngine", "vllm"), ("RayEngine", "ray")):
        files = [file for file in naming(engine, "grpo_pl", "serve") if f"rollout/{folder}/" not in file]
        assert len(files) <= 2, files


def test_a_metric_is_named_in_two_files() -> None:
    named = {metric: naming(metric, "grpo_pl", "serve", "docs") for metric in METRICS}
    assert {metric: files for metric, files in named.items() if len(files) not in (1, 2)} == {}
