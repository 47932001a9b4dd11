"""Shares, order and identities of a mixture."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from grpo_pl.data.curriculum import CurriculumPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class Counting(PromptSource):
    """Prompts numbered by step, so that any gap shows."""

    tag: str = "a"

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return [Problem(id=step * count + i, question=f"{self.tag}{step * count + i}", answer="") for i in range(count)]

    def validation(self, count: int | None = None) -> list[Problem]:
        return [Problem(id=-i, question=f"{self.tag}-{i}", answer="") for i in range(10 if count is None else count)]

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        return f"{self.tag}:{prompt.id}"


def _mixture(**weights: float) -> MixturePrompts:
    return MixturePrompts(parts={name: Counting(tag=name) for name in weights}, weights=weights)


def test_shares_are_the_weights_rounded_to_whole_prompts() -> None:
    assert _mixture(a=5, b=3, c=2).shares(16) == {"a": 8, "b": 5, "c": 3}
    assert _mixture(a=1, b=1).shares(5) == {"a": 3, "b": 2}
    assert MixturePrompts(parts={"a": Counting(), "b": Counting()}, weights={"b": 3}).shares(4) == {"a": 1, "b": 3}


def test_every_step_has_the_same_mix_and_no_part_skips_a_problem() -> None:
    mixture = _mixture(a=3, b=1)
    steps = [mixture.prompts(step, count=8) for step in range(4)]
    assert all(Counter(p.source for p in prompts) == {"a": 6, "b": 2} for prompts in steps)
    seen = sorted(int(p.question[1:]) for prompts in steps for p in prompts if p.source == "b")
    assert seen == list(range(8))
    assert steps[1] == _mixture(a=3, b=1).prompts(1, count=8)
    assert [p.source for p in steps[0]] != [p.source for p in steps[1]]  # shuffled


def test_problems_of_two_parts_never_share_an_id_and_keep_their_demonstrations() -> None:
    mixture = _mixture(a=1, b=1)
    prompts = mixture.prompts(0, count=20)
    assert len({p.id for p in prompts}) == 20
    for prompt in prompts:
        assert mixture.demonstration(prompt, random.Random(0)) == f"{prompt.source}:{prompt.question[1:]}"


def test_the_lists_of_the_parts_are_one_list() -> None:
    @dataclass(kw_only=True)
    class Listed(Counting):
        def problems(self, split: str) -> list[Problem]:
            return self.validation(3)

    mixture = MixturePrompts(parts={"a": Listed(tag="a"), "b": Listed(tag="b")})
    rows = mixture.problems("train")
    assert rows is not None
    assert [p.question for p in rows] == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert (rows[-3].question, [p.question for p in rows[2:4]]) == ("b-0", ["a-2", "b-0"])
    assert (rows[4].source, len(rows), len({p.id for p in rows})) == ("b", 6, 6)
    assert _mixture(a=1, b=1).problems("train") is None  # made up


def test_validation_takes_all_of_every_part_or_a_share() -> None:
    assert Counter(p.source for p in _mixture(a=3, b=1).validation()) == {"a": 10, "b": 10}
    assert Counter(p.source for p in _mixture(a=3, b=1).validation(4)) == {"a": 3, "b": 1}


def test_mistakes_are_one_clear_error() -> None:
    with pytest.raises(ValueError, match="needs `parts`"):
        MixturePrompts()
    with pytest.raises(ValueError, match=r"weights has 'c', which is not a part; the parts are \['a', 'b'\]"):
        MixturePrompts(parts={"a": Counting(), "b": Counting()}, weights={"c": 1})
    with pytest.raises(ValueError, match="weight of 'a' must be a positive number, got 0"):
        _mixture(a=0, b=1)
    with pytest.raises(ValueError, match="of 8 prompts, the part 'b' would give none"):
        _mixture(a=100, b=1).prompts(0, count=8)
    with pytest.raises(ValueError, match="'m' is a mixture itself"):
        MixturePrompts(parts={"m": _mixture(a=1)})
    with pytest.raises(ValueError, match="part 'c' chooses by what was solved"):
        MixturePrompts(parts={"c": CurriculumPrompts(source=Counting())})
