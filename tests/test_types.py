"""Names that users' own code was written with."""

import importlib
import sys
from pathlib import Path

import pytest

from grpo_pl import types
from grpo_pl.config.objects import build
from grpo_pl.data.sources import PromptSource

SOURCE = """
from dataclasses import dataclass

from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Prompt


@dataclass(kw_only=True)
class Doubling(PromptSource):
    first: int = 0

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Prompt]:
        numbers = range(self.first + step * count, self.first + (step + 1) * count)
        return [Prompt(id=n, question=f"2*{n}=", answer=str(2 * n)) for n in numbers]

    def validation(self, count: int | None = None) -> list[Prompt]:
        return self.prompts(-1, count=count or 4)
"""


def test_a_source_written_with_the_former_name_of_a_problem_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source_of_last_year.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.warns(FutureWarning, match=r"grpo_pl\.types\.Prompt is Problem now") as told:
        value = {"class_path": "source_of_last_year.Doubling", "init_args": {"first": 3}}
        source = build(PromptSource, value, "data.source")
    assert Path(told[0].filename).name == "source_of_last_year.py"
    (problem, _) = source.prompts(0, count=2)
    assert isinstance(problem, types.Problem)
    assert (problem.question, problem.answer) == ("2*3=", "6")
    del sys.modules["source_of_last_year"]


def test_other_names_are_missing_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match=r"grpo_pl\.types' has no attribute 'Promt'"):
        types.Promt  # noqa: B018
