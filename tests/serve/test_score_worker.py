"""What the reward worker tells of each completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_pl.rewards import ExactReward, FormatReward
from grpo_pl.rewards.base import Reward, Score
from serve.score_worker import ScoreItems, score_items


@dataclass(kw_only=True)
class Length(Reward):
    """Judges all of the text."""

    name: str = "length"

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(1.0, "ok") for _ in completions]


@pytest.mark.parametrize(
    ("reward", "completion", "extracted"),
    [
        (ExactReward(correctness=True), r"so \boxed{ 7 }", "7"),
        (ExactReward(correctness=True), r"\boxed{7}, or 8", "7"),
        (ExactReward(correctness=True), "7", None),
        (ExactReward(correctness=True, answer_in="last_number"), r"\boxed{7}, or 8", "8"),
        (ExactReward(correctness=True, answer_in="last_number"), "none", None),
        (ExactReward(correctness=True, answer_in="pattern", answer_pattern="####"), "1\n#### 8\n9", "8"),
        (ExactReward(correctness=True, answer_in="json"), '{"answer": 8}', "8"),
        (ExactReward(correctness=True, answer_in="last_number"), "7" * 3000 + " ", None),  # which is all of the text
        (ExactReward(correctness=True, answer_in="last_number"), "is " + "7" * 3000, "7" * 1000),
        (Length(correctness=True), "a long story", None),
        (Length(correctness=True), "a <answer>story</answer>", "story"),
    ],
)
def test_the_answer_that_the_correctness_reward_read_is_told(
    reward: Reward, completion: str, extracted: str | None
) -> None:
    job = ScoreItems([completion], ["7"], {})
    (item,) = score_items([FormatReward(weight=0.1), reward], job, slice(None))
    assert item["extracted"] == extracted
