"""The contract of a source of prompts."""

import pytest

from grpo_pl.data.curriculum import CurriculumPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.types import Problem


class Plain(PromptSource):
    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return []

    def validation(self, count: int | None = None) -> list[Problem]:
        return []


@pytest.mark.parametrize(
    "source",
    [
        ArithmeticPrompts(digits=2, operators="-", difficulty="carry", seed=3),
        SortingPrompts(length=5, symbols=3, seed=4),
        CurriculumPrompts(source=SortingPrompts(seed=1), pool=2, seed=5),
        MixturePrompts(parts={"a": SortingPrompts(seed=1), "b": ArithmeticPrompts(seed=2)}, weights={"a": 3.0}, seed=6),
    ],
    ids=lambda source: type(source).__name__,
)
def test_the_arguments_of_a_source_rebuild_it(source: PromptSource) -> None:
    rebuilt = type(source)(**source.init_args())
    assert rebuilt.prompts(3, 1, count=8) == source.prompts(3, 1, count=8)
    assert rebuilt.validation(8) == source.validation(8)


def test_a_source_that_is_no_dataclass_says_so() -> None:
    with pytest.raises(TypeError, match="Plain is not a dataclass"):
        Plain().init_args()


def test_problems_that_are_made_up_cannot_be_left_out() -> None:
    with pytest.raises(TypeError, match="Plain makes its problems up"):
        Plain().leave_out({"train": {0}})
