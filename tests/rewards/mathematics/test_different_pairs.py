"""No pair of answers that are known to differ is paid, in any spelling; pairs judged by a careful teacher."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_pl.rewards import MathReward
from tests.rewards.mathematics.different_pairs import CLASSES, pairs

TEACHER = Path(__file__).parents[1] / "data" / "teacher_pairs.jsonl"


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", CLASSES)
def test_no_answer_of_another_value_is_paid(reward: MathReward, name: str, count: int) -> None:
    different = list(pairs(name, count))
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in different], [gold for gold, _ in different], {})
    assert [pair for pair, score in zip(different, scores, strict=True) if score.value != 0.0] == []


@pytest.mark.parametrize("name", CLASSES)
def test_most_answers_of_the_same_value_are_paid(reward: MathReward, name: str) -> None:
    same = list(pairs(name, 81, equal=True))
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in same], [gold for gold, _ in same], {})
    refused = [pair for pair, score in zip(same, scores, strict=True) if score.value != 1.0]
    assert len(refused) <= 0.1 * len(same), refused


def test_pairs_are_judged_as_a_careful_teacher_would(reward: MathReward) -> None:
    """At most two wrong answers in 181 are paid and 50 right ones in 238 refused, beside what the docs announce."""
    rows = [json.loads(line) for line in TEACHER.read_text().splitlines()]
    places = {row.get("answer_in", "box") for row in rows}
    paid, refused = 0, 0
    for place in places:
        here = [row for row in rows if row.get("answer_in", "box") == place and not row.get("announced")]
        judge = replace(reward, answer_in=place, answer_pattern="####" if place == "pattern" else None)
        scores = judge([row["completion"] for row in here], [row["answer"] for row in here], {})
        paid += sum(s.value == 1.0 and row["expected"] == 0 for row, s in zip(here, scores, strict=True))
        refused += sum(s.value != 1.0 and row["expected"] == 1 for row, s in zip(here, scores, strict=True))
    assert paid <= 2
    assert refused <= 50
