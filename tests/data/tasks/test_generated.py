"""What sources that make their problems up all promise: functions of seed and step, splits apart, clear refusals."""

import re
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks import generated
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.data.tasks.countdown import CountdownPrompts
from grpo_pl.data.tasks.frozen_lake import FrozenLakePrompts
from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.data.tasks.guess_number import GuessNumberPrompts
from grpo_pl.data.tasks.one_liners import OneLinerPrompts
from grpo_pl.data.tasks.reasoning_gym import ReasoningGymPrompts
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.data.tasks.subset_sum import SubsetSumPrompts
from grpo_pl.data.tasks.sums import SumPrompts
from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.types import Problem

SOURCES: list[GeneratedPrompts] = [
    ArithmeticPrompts(digits=2, operators="+-", seed=7),
    FrozenLakePrompts(),
    GuessNumberPrompts(),
    OneLinerPrompts(),
    SortingPrompts(),
    SumPrompts(digits=2),
    WordProblems(),
]
if find_spec("reasoning_gym") is not None:
    SOURCES.append(ReasoningGymPrompts(task="chain_sum"))
    SOURCES.append(ReasoningGymPrompts(task="spell_backward", settings={"max_word_len": 5}))  # Tom and tom are one
each = pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)


def _training(source: GeneratedPrompts, steps: int, count: int) -> list[Problem]:
    return [problem for step in range(-steps, steps) for problem in source.prompts(step, count=count)]


@each
def test_a_step_is_a_function_of_seed_step_and_attempt(source: GeneratedPrompts) -> None:
    here = source.prompts(5, 1, count=8)
    source.prompts(6, count=20)
    assert here == source.prompts(5, 1, count=8) == replace(source).prompts(5, 1, count=8)
    others = [source.prompts(6, 1, count=8), source.prompts(5, count=8)]
    others.append(replace(source, seed=source.seed + 1).prompts(5, 1, count=8))
    assert all(other != here for other in others)


@each
def test_held_out_problems_are_the_same_at_every_call_and_fewer_are_the_first_ones(source: GeneratedPrompts) -> None:
    before = source.validation(50)
    source.prompts(0, count=30)
    assert source.validation(50) == before == replace(source).validation(50)
    assert source.validation(20) == before[:20] != replace(source, seed=source.seed + 1).validation(20)


def _asked(source: GeneratedPrompts, problem: Problem) -> str:
    """Equal for problems of which one gives the other away: also a + b and b + a, and what differs in case alone."""
    if isinstance(source, ArithmeticPrompts | SumPrompts):
        return "+".join(sorted(problem.question.rstrip("=").split("+")))
    return problem.question.casefold() or str(problem.columns.get("desc", problem.id))


@each
def test_no_problem_is_in_two_splits_or_twice_in_a_batch(source: GeneratedPrompts) -> None:
    held_out, train = source.validation(200), _training(source, steps=8, count=32)
    assert not {_asked(source, p) for p in held_out} & {_asked(source, p) for p in train}
    for batch in (held_out, source.prompts(3, count=80)):
        assert len({p.id for p in batch}) == len(batch)
    problems = {p.id: p.question or str(p.columns.get("desc", p.id)) for p in [*held_out, *train]}
    assert len(set(problems.values())) == len(problems)


@pytest.mark.parametrize(
    ("source", "questions"),
    [
        (ArithmeticPrompts(digits=1), {f"{a}+{b}=" for a, b in product(range(10), repeat=2)}),
        (SortingPrompts(length=2, symbols=4), {f"{a}{b}" for a, b in product(range(4), repeat=2)}),
    ],
)
def test_the_splits_of_a_small_task_lose_nothing(
    source: GeneratedPrompts, questions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "ALL", 20)  # of which there are fewer
    train, held_out = ({p.question for p in part} for part in (_training(source, 100, 5), source.validation()))
    assert train and held_out and not train & held_out and train | held_out == questions


@pytest.mark.parametrize(
    ("source", "count", "advice"),
    [
        (FrozenLakePrompts(size=2), 4, "raise size .2., change holes .0.2."),
        (SortingPrompts(length=2, symbols=4), 17, "raise length .2. or symbols .4."),
    ],
)
def test_more_problems_than_there_are_is_one_clear_error(source: GeneratedPrompts, count: int, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"^only \d+ different train problems found where {count} were .*{advice}"):
        source.prompts(0, count=count)
    with pytest.raises(ValueError, match=f"different val problems found where {count} were asked for"):
        source.validation(count)


@each
def test_the_advice_for_more_problems_names_settings(source: GeneratedPrompts) -> None:
    assert source.how_to_get_more().endswith(("ask for fewer.", "a smaller batch."))


REFUSED: dict[type[PromptSource], dict[str, list[Any]]] = {
    ArithmeticPrompts: {"digits": [0, 10], "min_digits": [4], "operators": ["+*", ""], "scratchpad_share": [1.5]},
    CountdownPrompts: {"largest": [2, 51], "limit": [19, 1000], "give_up": [-1], "unlucky": [1.5]},
    FrozenLakePrompts: {"size": [1, 8], "holes": [-0.5, 1.0], "good_share": [1.5], "longest_stroll": [0]},
    GuessNumberPrompts: {"halving_share": [-0.1]},
    OneLinerPrompts: {"operations": [0, 7], "careless_share": [1.5]},
    SortingPrompts: {"length": [1, 13], "symbols": [1, 11]},
    SubsetSumPrompts: {"size": [2, 7], "largest": [4, 17], "give_up": [2]},
    SumPrompts: {"terms": [1, 7], "digits": [0, 9], "tool_share": [-0.5]},
    WordProblems: {"held_out": ["names"], "two_step_share": [1.5], "largest": [9, 1001], "table": [4, 31]}
    | {"operations": ["*/", "+x", ""]},  # two steps need + or -
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_out_of_range_are_refused_by_their_names(kind: type[PromptSource]) -> None:
    for name, values in REFUSED[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=rf"\b{name}\b.*{re.escape(str(value))}"):
                kind(**{name: value})
