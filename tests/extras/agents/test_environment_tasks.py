"""The tasks that an environment brings along, as problems."""

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from grpo_pl.extras.agents.environment_tasks import EnvironmentPrompts

sys.path.append(str(Path(__file__).parents[2] / "plugins"))
from user_environments import Countdown, Stocked


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_tasks_are_problems_with_their_columns(isolation: Literal["thread", "process"]) -> None:
    source = EnvironmentPrompts(environment=Stocked(isolation=isolation, most=40), val_share=0.25)
    train, held_out = source.problems("train"), source.validation()
    assert sorted(problem.id for problem in [*train, *held_out]) == list(range(40)) and 2 < len(held_out) < 20
    problem = next(iter(train))
    assert (problem.question, problem.answer) == (f"from {problem.id}", "") and problem.columns == {"start": problem.id}
    epoch = [problem.id for step in range(2) for problem in source.prompts(step, count=len(train) // 2)]
    assert len(set(epoch)) == 2 * (len(train) // 2)
    again = EnvironmentPrompts(**source.init_args())
    assert again.prompts(1, count=4) == source.prompts(1, count=4) and again.digests() == source.digests()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (Countdown(isolation="thread"), "Countdown brings no tasks along"),
        (Stocked(most=-1), "there are -1 tasks"),
        (Stocked(most=0), "ZeroDivisionError: division by zero"),
    ],
)
def test_tasks_that_cannot_be_listed_are_told(environment: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EnvironmentPrompts(environment=environment).problems("train")
