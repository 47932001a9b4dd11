"""Equal answers vote together, whatever they look like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_pl.rewards import FunctionReward, PerSource
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.completion_text import stated_answer
from grpo_pl.rewards.logged_extras import LoggedExtras
from grpo_pl.rewards.mathematics.math_reward import ExactReward, MathReward
from grpo_pl.rewards.voting import answer_classes


def _classes(reward: Reward, answers: Sequence[str], golds: Sequence[str], group_size: int) -> list[int]:
    completions = [rf"so \boxed{{{answer}}}" if answer else "hm" for answer in answers]
    return _voted(reward, completions, golds, group_size)


def _voted(
    reward: Reward, completions: Sequence[str], golds: Sequence[str] = ("99",), group_size: int = 0
) -> list[int]:
    group_size = group_size or len(completions)
    golds = [gold for gold in golds for _ in range(group_size)]
    columns = {"prompt": [""] * len(completions)}
    scores = reward(completions, golds, columns)
    return answer_classes(reward, completions=completions, scores=scores, columns=columns, group_size=group_size)


def test_values_vote_together_and_not_their_spelling(reward: MathReward) -> None:
    answers = [r"\frac12", "0.5", "3", "0.50", "", r"\frac{6}{2}", "4", "7", "7.0", "3"]
    assert _classes(reward, answers, ["9", "3"], 5) == [1, 1, 2, 1, -1, 1, 2, 3, 3, 0]


def test_strings_vote_apart_where_the_reward_compares_strings() -> None:
    assert _classes(ExactReward(correctness=True), ["0.5", "1/2", "0.5", "2"], ["2"], 4) == [1, 2, 1, 0]


def test_the_answer_that_is_judged_is_the_one_that_votes(reward: MathReward) -> None:
    """Neighbouring boxes are one answer; of a thought `ExactReward` reads nothing."""
    pairs = [r"\boxed{3} and \boxed{2}", r"\boxed{1} and \boxed{2}", r"\boxed{2} or \boxed{3}"]
    assert _voted(reward, [*pairs, r"\boxed 7", r"\boxed{7}"]) == [1, 2, 1, 3, 3]
    thoughts = ["\\boxed{5}", "\\boxed{5}<think>or \\boxed{6}", "<think>\\boxed{5}</think>\\boxed{6}"]
    assert _voted(ExactReward(correctness=True), thoughts) == [1, 1, 2]


@dataclass(kw_only=True)
class Unsure(Reward):
    """Takes too long for every answer but one, and counts how often it is asked."""

    name: str = "unsure"
    calls: int = 0

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.calls += 1
        return [Score(0.0, "timeout") for _ in completions]


def test_costly_answers_are_compared_as_text_only() -> None:
    reward = Unsure()
    assert _classes(reward, ["a", "b", "a", "c"], ["d"], 4) == [1, 2, 1, 3]
    assert reward.calls == 1  # against the gold answer


@dataclass(kw_only=True)
class OwnColumn(Reward):
    """Right where the answer is the row's ``target``: the gold answer plays no part."""

    name: str = "own"

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(float(stated_answer(c) == t), "ok") for c, t in zip(completions, columns["target"], strict=True)]


def test_rows_keep_their_own_columns_when_they_are_compared() -> None:
    completions = [r"\boxed{5}", r"\boxed{6}", r"\boxed{7}", r"\boxed{6}"]
    columns = {"target": ["5", "6", "8", "8"]}
    scores = OwnColumn()(completions, [""] * 4, columns)
    found = answer_classes(OwnColumn(), completions=completions, scores=scores, columns=columns, group_size=2)
    assert found == [0, 0, 1, 2]


def test_a_function_that_cannot_read_an_answer_as_a_gold_one_does_not_end_the_votes() -> None:
    def same(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        return [float(int(a) == len(c)) for c, a in zip(completions, answer, strict=True)]

    with pytest.warns(UserWarning, match="cannot compare answers, votes go by their text: ValueError"):
        assert _voted(FunctionReward(function=same), ["one", "two!", "one", "four?"], ["5"]) == [1, 2, 1, 0]


def test_a_reward_for_each_source_votes_where_nothing_is_logged() -> None:
    reward = PerSource(rewards={"a": ExactReward()})
    completions, columns = [r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"], {"source": ["a"] * 3}
    given = {"completions": completions, "scores": reward(completions, ["5"] * 3, columns), "columns": columns}
    with LoggedExtras(0, kept=False).collect():
        assert answer_classes(reward, **given, group_size=3) == [1, 2, 1]
