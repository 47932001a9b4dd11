"""Several rewards at once: sums, what a right answer is, and rewards that do not keep to the contract."""

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from grpo_pl.rewards import ExactReward, FormatReward, PerSource
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score
from grpo_pl.rewards.batch import check_rewards, score_completions


@dataclass(kw_only=True)
class Given(Reward):
    """Returns the scores it was given."""

    scores: list[Score] = field(default_factory=list)
    name: str = "given"
    weight: float = 1.0
    correctness: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list, init=False)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.calls.append((completions, answers, columns))
        return self.scores


class _Odd(Reward):
    """Returns, or raises, what it is given."""

    def __init__(self, result: Any, on_error: Any = "raise") -> None:
        self.name, self.result, self.on_error = "odd", result, on_error

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Any]) -> list[Score]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result  # type: ignore[no-any-return]


UNKNOWN = Score(None, "unavailable")


def _scored(*rewards: Given) -> Any:
    rows = len(rewards[0].scores)
    return score_completions(rewards, completions=["c"] * rows, answers=["a"] * rows, columns={})


def test_total_is_the_weighted_sum_over_the_values_unless_the_judge_has_none() -> None:
    first = Given(
        name="a", weight=2.0, correctness=True, scores=[Score(1.0, "ok"), Score(0.5, "wrong"), UNKNOWN, UNKNOWN]
    )
    second = Given(name="b", weight=-0.25, scores=[Score(1.0, "ok"), UNKNOWN, Score(4.0, "ok"), UNKNOWN])
    assert _scored(first, second).totals() == [1.75, 1.0, None, None]


def test_correct_is_the_full_value_of_the_correctness_reward_alone() -> None:
    form = Given(name="form", scores=[Score(1.0, "ok")] * 4)
    judge = Given(
        name="judge", correctness=True, scores=[Score(1.0, "ok"), Score(0.99, "wrong"), Score(0.0, "timeout"), UNKNOWN]
    )
    scored = _scored(form, judge)
    assert scored.correct() == [True, False, False, None]
    assert scored.judged() == judge.scores
    assert scored.status_counts()["judge"] == {"ok": 1, "wrong": 1, "timeout": 1, "unavailable": 1}
    assert scored.values()[1][:3] == [1.0, 0.99, 0.0] and math.isnan(scored.values()[1][3])
    assert scored.select([3, 1]).scores[1] == [UNKNOWN, Score(0.99, "wrong")]


def test_without_a_correctness_reward_nothing_is_right_and_the_sum_is_what_is_judged() -> None:
    form = Given(name="form", scores=[Score(1.0, "ok"), Score(0.0, "no_answer"), Score(1.0, "ok"), UNKNOWN])
    length = Given(name="length", weight=0.5, scores=[Score(1.0, "ok"), Score(0.5, "wrong"), UNKNOWN, UNKNOWN])
    scored = _scored(form, length)
    assert scored.correct() == [None] * 4
    assert scored.totals() == [1.5, 0.25, 1.0, None]
    assert [(score.value, score.status) for score in scored.judged()] == [
        (1.5, "ok"),
        (0.25, "no_answer"),
        (1.0, "unavailable"),
        (None, "unavailable"),
    ]
    assert scored.judged()[1].detail == "form 0, length 0.5"


def test_a_completion_is_described_by_what_every_reward_said_of_it() -> None:
    form = Given(name="form", scores=[Score(0.5, "wrong", "no think"), UNKNOWN])
    judge = Given(name="judge", correctness=True, scores=[Score(1.0, "ok"), Score(0.0, "timeout", "over 1 s")])
    assert _scored(form, judge).described(1) == {
        "form": {"value": None, "status": "unavailable", "detail": ""},
        "judge": {"value": 0.0, "status": "timeout", "detail": "over 1 s"},
    }


def test_each_reward_sees_the_whole_batch_once() -> None:
    reward = Given(scores=[Score(0.0, "wrong")] * 2)
    score_completions([reward], completions=["x", "y"], answers=["1", "2"], columns={"prompt": ["p", "q"]})
    assert reward.calls == [(["x", "y"], ["1", "2"], {"prompt": ["p", "q"]})]


@dataclass(kw_only=True)
class Emptying(Reward):
    """Scores what it reads in all its cells, which it empties."""

    name: str = "emptying"
    seen: list[Any] = field(default_factory=list, init=False)

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        self.seen.append(copy.deepcopy((completions, answers, dict(columns))))
        for column in (completions, answers, *columns.values()):
            for cell in column:
                for part in (cell, *(cell if isinstance(cell, list) else ())):
                    if isinstance(part, list | dict | set):
                        part.clear()
            assert isinstance(column, list)
            column[:] = [""] * len(column)
        return [Score(0.0, "wrong")] * len(completions)


def test_a_reward_that_changes_its_cells_changes_them_for_no_other() -> None:
    shared = [{"role": "user", "content": "u"}]  # of all completions of one prompt
    tests = {"inputs": ["1"], "outputs": ["2"]}
    columns = {"messages": [shared, shared], "tests": [tests, tests], "ids": [[1, 2], [3]], "tags": [{"a"}, None]}
    columns["source"] = ["x", "x"]
    before = (["c", "d"], ["1", "2"], copy.deepcopy(columns))
    first, last, inner = Emptying(), Emptying(name="last"), Emptying(name="inner")
    rewards = [first, PerSource(rewards={"x": inner}), last]
    score_completions(rewards, completions=["c", "d"], answers=["1", "2"], columns=columns)
    assert first.seen == inner.seen == last.seen == [before]
    assert columns == before[2]


def test_a_cell_that_cannot_be_copied_is_given_as_it_is() -> None:
    reward, lock = Given(scores=[Score(0.0, "wrong")]), threading.Lock()
    score_completions([reward], completions=["c"], answers=["a"], columns={"lock": [lock]})
    assert reward.calls[0][2]["lock"][0] is lock


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "no rewards"),
        ([ExactReward(correctness=True), ExactReward()], "two rewards are named 'exact'"),
        ([FormatReward(weight=math.nan), ExactReward(correctness=True)], "'format' has weight nan"),
        ([_Odd(None, "nothing")], "reward 'odd' has on_error 'nothing': give raise or none"),
        ([ExactReward(correctness=True), FormatReward(correctness=True)], r"2 rewards have .* \(exact, format\)"),
    ],
)
def test_rewards_that_training_could_not_use_are_refused(rewards: list[Reward], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards(rewards)


def test_rewards_that_training_can_use_pass() -> None:
    check_rewards([ExactReward(correctness=True), FormatReward(weight=0.1), ExactReward(name="again", weight=-1.0)])
    check_rewards([FormatReward()])  # none says what is right


FAULTS = [
    (KeyError("x"), KeyError, "x"),
    ([], ValueError, "reward 'odd' returned 0 scores for 2 completions"),
    ([Score(1.0, "ok")] * 3, ValueError, "reward 'odd' returned 3 scores for 2 completions"),
    ([Score(math.nan, "ok")] * 2, ValueError, "reward 'odd' returned nan"),
    ([Score(math.inf, "ok")] * 2, ValueError, "reward 'odd' returned inf"),
    ([1.0, 0.5], TypeError, "reward 'odd' returned 1.0: return one Score for each completion"),
    (None, TypeError, "reward 'odd' returned None"),
    (0.5, TypeError, "reward 'odd' returned 0.5"),
]


@pytest.mark.parametrize(("result", "kind", "text"), FAULTS)
def test_what_a_reward_does_wrong_is_told_by_its_name_or_becomes_none(result: Any, kind: Any, text: str) -> None:
    given = {"completions": ["a", "b"], "answers": ["", ""], "columns": {}}
    with pytest.raises(kind, match=text) as raised:
        score_completions([_Odd(result)], **given)
    if isinstance(result, Exception):
        assert raised.value.__notes__ == ["raised by the reward 'odd'"]
    with pytest.warns(UserWarning, match=f"'odd' failed and scores None .*{kind.__name__}"):
        scored = score_completions([_Odd(result, "none")], **given)
    assert [(score.value, score.status) for score in scored.scores[0]] == [(None, "unavailable")] * 2


def test_rows_that_lack_a_column_are_no_fault_of_the_reward() -> None:
    with pytest.raises(MissingColumn):
        score_completions([_Odd(MissingColumn("x"), "none")], completions=["a"], answers=[""], columns={})


def test_an_episode_without_a_return_is_nobodys_fault_and_one_that_returned_nothing_is_judged() -> None:
    """Its environment failed: the text would be judged as if the policy had stopped there."""
    episodes = [{"return": None, "detail": "out of memory"}, {"return": 0.0}, None, {"return": -1.0}]
    rewards = [
        Given(scores=[Score(1.0, "ok")] * 4, correctness=True),
        Given(name="other", scores=[Score(0.5, "ok")] * 4),
    ]
    scored = score_completions(rewards, completions=["c"] * 4, answers=["a"] * 4, columns={"episode": episodes})
    for row, value in zip(scored.scores, (1.0, 0.5), strict=True):
        assert row[0] == Score(None, "unavailable", "out of memory")
        assert [score.value for score in row[1:]] == [value] * 3
    assert scored.totals() == [None, 1.5, 1.5, 1.5]
