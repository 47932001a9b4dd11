"""No scorer of reasoning-gym pays in full for constants, for the question, or for several answers at once."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_pl.rewards.reasoning_gym import COLUMN, ReasoningGymReward
from grpo_pl.rewards.sandbox.gym_entry import REFUSED, GymProblem, pack

PROBLEMS = 6
QUICK = ["coin_flip", "complex_arithmetic", "game_of_life_halting", "number_sorting", "propositional_logic", "puzzle24"]
OTHERS = sorted(set(DATASETS) - REFUSED.keys() - set(QUICK))
# fmt: off
NUMBERS = ["0", "1", "-1", "2", "3", "7", "10", "12", "100", "0.5", "0.25", "0.0", "00", "+1", "1e308", "1e-300",
           "1e999", "1j", "0,0", "1/2", "1/0", "9999999999999999", "0x0", "0b1"]
NO_NUMBERS = ["nan", "NaN", "-nan", "nanj", "nan+nanj", "(nan,0)", "inf", "-inf", "Infinity", "inf+infj", "0/0", "oo",
              "zoo"]
WORDS = ["idk", "True", "False", "true", "false", "yes", "no", "Yes", "No", "None", "null", "unknown", "impossible",
         "A", "B", "x", "the", "up", "north", "Monday", "U"]
FORMS = ["[]", "{}", "()", "[[]]", "[[0]]", "[0, 0]", "(0, 0)", '{"a": 1}', '[""]', "#", "?", ".", ",", "*", "\n"]
LISTS = ["I do not know", "0 0 0", "1 2 3 4 5 6 7 8 9", "a, b, c", "True False", "yes no", "UDLR" * 50, "00:00"]
# fmt: on
SUMS = ["6*2*2*1", "6*4*1**9", "4!", "E/E", "24.5", "1+2", "(2*3)*4*1"]
NAN_LISTS = ["[" + ", ".join(["NaN"] * count) + "]" for count in range(2, 11)]
GLUES = (", ", " ", " or ", " and ", "\n", " | ", "; ", " / ", " = ", " < ", " if x else ")
WEAK = ["(P ∨ ¬P)", "(P → P)", "¬(P ∧ (Q ∧ (R ∧ S)))", "¬(P ∧ Q)", "(¬P ∨ ¬Q)", "(P → (Q → R))"]
CONSTANTS = [*NUMBERS, *NO_NUMBERS, *WORDS, *FORMS, *LISTS, *SUMS, *NAN_LISTS, *WEAK]


def _echoes(entry: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What can be said without solving anything: parts of the question, another problem's answer, several answers."""
    question, numbers = entry["question"], re.findall(r"-?\d+(?:\.\d+)?", entry["question"])
    lines = [line for line in question.splitlines() if line.strip()]
    said = [question, *lines[-8:], *numbers[-3:], *(glue.join(numbers) for glue in (" ", ", ", "+", "*"))]
    premises = [line.split(". ", 1)[-1] for line in lines]
    gold, second = entry["answer"], other["answer"]
    several = [] if gold is None else [*(f"{gold}{glue}{second}" for glue in GLUES)]
    return [*said, *premises, str(second), *several]


def _same(answer: str, gold: str | None) -> bool:
    """Whether a person would take a paid answer for the gold one: equal as text, or as a number to 3 digits."""
    if gold is None:
        return False
    if "".join(answer.split()).casefold() == "".join(gold.split()).casefold():
        return True
    try:
        stated, true = (float(text.replace(",", "").strip()) for text in (answer, gold))
    except ValueError:
        return False
    return math.isclose(stated, true, rel_tol=5e-3, abs_tol=1e-9)


def _paid(gym: ReasoningGymReward, task: str) -> Iterator[tuple[str, str | None, float]]:
    """(answer, gold answer, value) of every candidate that a person would not accept."""
    problems = reasoning_gym.create_dataset(task, size=20, seed=4242)
    for i in range(PROBLEMS):
        entry, other = problems[i], problems[i + 1]
        packed = pack(GymProblem(task, {}, entry))
        answers = [a for a in (*CONSTANTS, *_echoes(entry, other)) if not _same(a, entry["answer"])]
        completions, columns = [f"<answer>{a}</answer>" for a in answers], {COLUMN: [packed] * len(answers)}
        scores = gym(completions, answers, columns)
        for answer, score in zip(answers, scores, strict=True):
            assert score.status != "bad_gold", score
            yield answer, entry["answer"], score.value or 0.0


@pytest.mark.parametrize("task", [*QUICK, *(pytest.param(task, marks=pytest.mark.slow) for task in OTHERS)])
def test_nothing_is_paid_in_full_without_an_answer(gym: ReasoningGymReward, task: str) -> None:
    paid = [(answer, gold, value) for answer, gold, value in _paid(gym, task)]
    assert [(answer[:60], gold, value) for answer, gold, value in paid if value >= 1.0] == []
    for constant in CONSTANTS:
        values = [value for answer, _, value in paid if answer == constant]
        assert sum(values) <= 0.3 * PROBLEMS, (constant, values)
