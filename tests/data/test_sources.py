"""The contract of a source of prompts."""

import random
from dataclasses import dataclass

import pytest

from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Problem


class Plain(PromptSource):
    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return []

    def validation(self, count: int | None = None) -> list[Problem]:
        return []


@dataclass(kw_only=True)
class WithArguments(Plain):
    size: int = 3


def test_fields_of_a_source_are_the_arguments_that_rebuild_it() -> None:
    assert WithArguments(**WithArguments(size=5).init_args()).size == 5


def test_a_source_that_is_no_dataclass_says_so() -> None:
    with pytest.raises(TypeError, match="Plain is not a dataclass"):
        Plain().init_args()


def test_a_source_knows_no_demonstrations_unless_it_says_so() -> None:
    assert Plain().demonstration(Problem(id=0, question="?", answer="!"), random.Random(0)) is None
