"""The advantage line by line: its last line is what training has, and its lines are those of a calculation by hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import pytest

from grpo_pl.extras.replay.arithmetic import Line, advantage_lines
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import Reward, Score
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch
from tests.plugins.loo_median import LeaveOneOutMedian

EPS, LONGEST = 1e-5, 8
TEXTS = {0: ["1;0", "0;1..", "0;0", "1;1"], 1: ["0;0", "0;1", "?;?", "1;0....."]}
"""Two rewards of each completion, whose weights are 1 and 0.5; ``?`` has no value. Tokens: 4, 6, 4, 4, and 4, 4, 4, 8,
the last of them cut off."""
FIRST, SECOND = [1.0, 0.5, 0.0, 1.5], [0.0, 0.5, 1.0]  # sums of the completions of each group that have a value
ALL = FIRST + SECOND


@dataclass(kw_only=True)
class Told(Reward):
    """The number at a place of the text."""

    place: int = 0

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        said = [text.rstrip(".").split(";")[self.place] for text in completions]
        return [Score(None, "unavailable") if each == "?" else Score(float(each), "ok") for each in said]


@pytest.fixture
def made(make_experience: Callable[..., Experience]) -> Callable[..., tuple[Experience, Callable[[int], list[Line]]]]:
    """``made(baseline="none", …)``: the experience under an objective, and the lines of each of its completions."""

    def make(**fields: Any) -> tuple[Experience, Callable[[int], list[Line]]]:
        algorithm = GRPOAlgorithm(**{"group_size": 4, "beta": 0.0, **fields})
        prompts = [Problem(id=i, question="1+1=", answer="2") for i in TEXTS]
        experience = make_experience(
            TEXTS,
            batch=PromptBatch(step=0, prompts=prompts, valid=[True] * 2),
            rewards=[Told(name="first"), Told(name="second", place=1, weight=0.5)],
            algorithm=algorithm,
            max_completion_length=LONGEST,
        )
        return experience, lambda row: advantage_lines(algorithm, experience, row, max_completion_length=LONGEST)

    return make


@pytest.mark.parametrize(
    ("fields", "row", "values"),
    [
        ({}, 3, [1.5, 0.75, 0.75, stdev(FIRST), 0.75 / (stdev(FIRST) + EPS)]),
        ({}, 5, [0.5, 0.5, 0.0, 0.5, 0.0]),
        ({"std_ddof": 0}, 7, [1.0, 0.5, 0.5, math.sqrt(1 / 6), 0.5 / (math.sqrt(1 / 6) + EPS)]),
        ({"scale": "none"}, 0, [1.0, 0.75, 0.25]),
        ({"baseline": "leave_one_out", "scale": "none"}, 7, [1.0, 0.25, 0.75]),
        (
            {"baseline": "batch_mean", "scale": "batch_std"},
            2,
            [0.0, mean(ALL), -mean(ALL), stdev(ALL), -mean(ALL) / (stdev(ALL) + EPS)],
        ),
        ({"baseline": "none", "scale": "none"}, 1, [0.5]),
        ({}, 6, [0.0]),
        ({"mask_truncated": True, "scale": "none"}, 7, [1.0, 0.5, 0.5, 0.0]),
        ({"overlong_buffer": 0.5, "scale": "none"}, 1, [0.5, 0.0, 0.625, -0.625]),
        ({"max_rewards": True, "baseline": "none", "scale": "none"}, 3, [1.5, 1.5]),
        ({"max_rewards": True, "baseline": "none", "scale": "none"}, 0, [1.0, 0.0]),
    ],
)
def test_each_line_is_that_of_a_calculation_by_hand(
    made: Any, fields: dict[str, Any], row: int, values: list[float]
) -> None:
    experience, lines = made(**fields)
    assert [line.value for line in lines(row)] == pytest.approx(values, abs=1e-6)
    assert values[-1] == pytest.approx(float(experience.statistics.advantages.flatten()[row]), abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"scale": "token_whitening", "baseline": "batch_mean"},
        {"reward_aggregation": "normalize_then_sum"},
        {"overlong_buffer": 0.25, "baseline": "leave_one_out"},
        {"baseline": "greedy", "scale": "none"},
    ],
)
def test_the_last_line_is_the_advantage_of_the_training(made: Any, fields: dict[str, Any]) -> None:
    experience, lines = made(**fields)
    for row in range(8):
        found = lines(row)
        assert found[-1].value == pytest.approx(float(experience.statistics.advantages.flatten()[row]), abs=1e-6)
        assert not any("own code" in line.what for line in found)  # the lines alone come to it


def test_tokens_are_whitened_by_mean_and_deviation_over_tokens(made: Any) -> None:
    _, lines = made(scale="token_whitening", baseline="batch_mean")
    lengths = [4, 6, 4, 4, 4, 4, 8]
    tokens = [reward - mean(ALL) for reward, length in zip(ALL, lengths, strict=True) for _ in range(length)]
    values = [line.value for line in lines(3)]
    whitened = (1.5 - mean(ALL) - mean(tokens)) / (stdev(tokens) + EPS)
    assert values[-3:] == pytest.approx([mean(tokens), stdev(tokens), whitened], abs=1e-5)


def test_each_reward_is_normalised_by_itself(made: Any) -> None:
    _, lines = made(reward_aggregation="normalize_then_sum")
    first, second = [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]
    values = [line.value for line in lines(3)]
    parts = [0.5 / (stdev(first) + EPS), 0.5 / (stdev(second) + EPS)]
    assert values[1:4] == pytest.approx([*parts, parts[0] + 0.5 * parts[1]], abs=1e-5)


def test_a_greedy_completion_without_a_reward_leaves_its_group_out_and_no_number_is_nan(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEXTS, 1, ["?;?", *TEXTS[1][1:]])  # which is drawn greedily as well
    experience, lines = made(baseline="greedy", scale="none")
    assert experience.greedy is not None and experience.greedy.totals() == [1.0, None]
    for row in (5, 7):
        assert [line.value for line in lines(row)] == [float(experience.statistics.rewards.flatten()[row]), 0.0]
        assert "greedy" in lines(row)[-1].what
    assert [line.value for line in lines(3)][:3] == [1.5, 1.0, 0.5]


def test_a_baseline_of_ones_own_is_told_as_what_its_code_gives(made: Any) -> None:
    experience, lines = made(baseline=LeaveOneOutMedian(), scale="none")
    assert [(line.what, line.value) for line in lines(3)] == [
        ("reward", 1.5),
        ("advantage, as the objective's own code gives it", float(experience.statistics.advantages[0, 3])),
    ]
