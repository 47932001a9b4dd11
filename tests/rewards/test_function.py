import asyncio
import pickle
from pathlib import Path

import pytest

from grpo_pl.rewards import FunctionReward
from grpo_pl.rewards.function import load_function

SOURCE = """
import asyncio

def accuracy(completions, answer, **kwargs):
    return [1.0 if gold in text else 0.0 for text, gold in zip(completions, answer)]

def by_column(prompts, completions, difficulty, **kwargs):
    return [len(p) + len(c) + d for p, c, d in zip(prompts, completions, difficulty)]

def no_kwargs(completions):
    return [None if c == "skip" else 0.5 for c in completions]

def chat(completions, **kwargs):
    return [float(len(c[0]["content"])) for c in completions]

async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def short(completions, **kwargs):
    return [1.0]

def infinite(completions, **kwargs):
    return [float("inf")] * len(completions)

def broken(completions, **kwargs):
    raise KeyError("solution")

def nameless(texts):
    return [1.0]

CONSTANT = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_function_gets_completions_answers_and_columns(file: Path) -> None:
    accuracy = FunctionReward(function=f"{file}:accuracy")
    assert [(s.value, s.status) for s in accuracy(["a5", "b"], ["5", "6"], {})] == [(1.0, "ok"), (0.0, "wrong")]
    by_column = FunctionReward(function=f"{file}:by_column")
    columns = {"prompt": ["pp", "p"], "difficulty": [10, 20]}
    assert [s.value for s in by_column(["abc", ""], ["", ""], columns)] == [15.0, 21.0]


def test_none_says_nothing_and_a_function_without_kwargs_gets_what_it_names(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:no_kwargs")
    scores = reward(["skip", "x"], ["", ""], {"prompt": ["", ""], "more": [1, 2]})
    assert [(s.value, s.status) for s in scores] == [(None, "unavailable"), (0.5, "wrong")]


def test_chat_functions_of_trl_run_unchanged(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:chat", conversational=True)
    assert [s.value for s in reward(["abc", ""], ["", ""], {})] == [3.0, 0.0]


def test_async_functions_run_with_and_without_a_loop(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:slow")

    async def inside() -> list[float | None]:
        return [s.value for s in reward(["x", "y"], ["", ""], {})]

    assert [s.value for s in reward(["x"], [""], {})] == [2.0]
    assert asyncio.run(inside()) == [2.0, 2.0]


def test_dotted_names_work_with_a_dot_or_a_colon() -> None:
    assert load_function("os.path.join") is load_function("os.path:join")


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("nothing", "must look like"),
        ("no_such_module.f", "no_such_module"),
        ("os.path.no_such", "no such name"),
        ("no_such_file.py:f", "no file"),
    ],
)
def test_references_that_lead_nowhere_are_one_line_errors(reference: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        FunctionReward(function=reference)
    assert repr(reference) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_file_raises_at_import_is_a_one_line_error(tmp_path: Path, file: Path) -> None:
    (tmp_path / "bad.py").write_text("raise RuntimeError('first\\nsecond')")
    with pytest.raises(ValueError, match="RuntimeError: first second"):
        FunctionReward(function=f"{tmp_path}/bad.py:f")
    with pytest.raises(ValueError, match="int, which cannot be called"):
        FunctionReward(function=f"{file}:CONSTANT")
    with pytest.raises(ValueError, match="completions"):
        FunctionReward(function=f"{file}:nameless")


def test_wrong_results_name_the_function(file: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.py:short.* 1 values for 2"):
        FunctionReward(function=f"{file}:short")(["a", "b"], ["", ""], {})
    with pytest.raises(ValueError, match=r"mine\.py:infinite.*inf"):
        FunctionReward(function=f"{file}:infinite")(["a"], [""], {})
    with pytest.raises(KeyError) as error:
        FunctionReward(function=f"{file}:broken")(["a"], [""], {})
    assert "mine.py:broken" in error.value.__notes__[0]


def test_a_function_reward_survives_pickle(file: Path) -> None:
    twin = pickle.loads(pickle.dumps(FunctionReward(function=f"{file}:accuracy", name="mine")))
    assert twin.name == "mine"
    assert twin(["5"], ["5"], {})[0].value == 1.0
