"""Values that engines and users' own code take: what a request refuses, and names of former versions."""

import dataclasses
import importlib
import pickle
import sys
from pathlib import Path

import pytest

from grpo_pl import types
from grpo_pl.config.objects import build
from grpo_pl.data.sources import PromptSource

SOURCE = """
from dataclasses import dataclass

from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Prompt, GenerateRequest


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


def _keys(*sizes: int) -> list[list[types.SampleKey]]:
    return [
        [types.SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=p, sample=g) for g in range(size)]
        for p, size in enumerate(sizes)
    ]


def _request(prompt_ids: list[list[int]], keys: list[list[types.SampleKey]]) -> types.GenerateRequest:
    sampling = types.SamplingParams()
    return types.GenerateRequest(prompt_ids=prompt_ids, keys=keys, sampling=sampling, eos_token_ids=[2], pad_token_id=0)


@pytest.mark.parametrize(
    ("prompt_ids", "sizes", "message"),
    [
        ([], (), "0 prompts for 0 groups"),
        ([[1]], (1, 1), "1 prompts for 2"),
        ([[1], []], (1, 1), "a prompt has no tokens"),
        ([[1], [2]], (1, 2), r"one common size of at least 1, got sizes \[1, 2\]"),
        ([[1]], (0,), r"got sizes \[0\]"),
    ],
)
def test_a_request_that_no_engine_can_answer_is_refused(
    prompt_ids: list[list[int]], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _request(prompt_ids, _keys(*sizes))


def test_a_request_is_a_value() -> None:
    """It stays as it was when its sources change, equals itself in another process, and parts are checked again."""
    prompt_ids, keys = [[1, 2], [3]], _keys(2, 2)
    request = _request(prompt_ids, keys)
    assert request.group_size == 2
    prompt_ids[1].clear()
    keys.clear()
    assert request.prompt_ids == ((1, 2), (3,)) and request == _request([[1, 2], [3]], _keys(2, 2))
    assert pickle.loads(pickle.dumps(request)) == request
    assert dataclasses.replace(request, prompt_ids=[[1]], keys=request.keys[:1]) == _request([[1]], _keys(2))
    with pytest.raises(ValueError, match="1 prompts for 2"):
        dataclasses.replace(request, prompt_ids=[[1]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.pad_token_id = 1  # type: ignore[misc]
