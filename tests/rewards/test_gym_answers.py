"""No scorer of reasoning-gym pays in full for constants, for parts of the question, for several answers at once, or for
its own answer with text around it."""

# ruff: noqa: E501

import json
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
from grpo_pl.rewards.sandbox.gym_guards import enough, objection

PROBLEMS = 6
QUICK = ["coin_flip", "complex_arithmetic", "game_of_life_halting", "number_sorting", "propositional_logic", "puzzle24"]
QUICK_WITH_TEXT = ["knights_knaves", "sokoban", "kakurasu", "survo", "gsm_symbolic", "quantum_lock", "pool_matrix",
                   "cryptarithm", "propositional_logic"]  # fmt: skip
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


def _tasks(quick: list[str]) -> list[Any]:
    return [*quick, *(pytest.param(task, marks=pytest.mark.slow) for task in sorted({*DATASETS} - {*REFUSED, *quick}))]


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


@pytest.mark.parametrize("task", _tasks(QUICK))
def test_nothing_is_paid_in_full_without_an_answer(gym: ReasoningGymReward, task: str) -> None:
    paid = [(answer, gold, value) for answer, gold, value in _paid(gym, task)]
    assert [(answer[:60], gold, value) for answer, gold, value in paid if value >= 1.0] == []
    for constant in CONSTANTS:
        values = [value for answer, _, value in paid if answer == constant]
        assert sum(values) <= 0.3 * PROBLEMS, (constant, values)


# --- text around the right answer ---

JUNK = [
    "junk {a}", "{a} junk", "junk {a} junk", "junk\n{a}", "{a}\njunk", "The answer is {a}.", "not {a}", "It is not true that {a}",
    "{a} or not", "{a} # junk", "{a} // junk", "{a}; junk", "junk: {a}", "{a} (junk)", "{a}zq", "zq{a}", "{a} !?", "({a})?", "{a} #@",
    "```\n{a}\n``` junk", "{a} = junk", "junk = {a}", "<b>{a}</b>", "{a} \u200bjunk", "{a} 7", "7 {a}", "{a}\n7", "7\n{a}", "{a} -1 0",
    "{a} {a}", "{a}\n{a}", "{a}, {a}", "{a}{a}", "{a} or {a}", "{a} {a} {a}", "{a} or {o}", "{o} or {a}", "{a} {o}", "{o} {a}", "{a}, {o}",
    "{o}, {a}", "{a}\n{o}", "{o}\n{a}", "{o} {a} {o}", "{q}\n{a}", "{a}\n{q}", "{a} junk junk junk junk", "{a}\n\n\njunk\n\njunk",
    "1 2 3 4 5 6 7 8 9 {a}", "{a} 0 1 2 3 4 5 6 7 8 9", "a b c d e f {a}", "yes no {a}", "{a} True False", "-{a}", "--{a}", "~{a}",
]  # fmt: skip
"""Answers made of the right one ``a``, that of another problem ``o`` and the question ``q``."""
MEANT: dict[str, set[str]] = {
    **{task: {"--{a}"} for task in ("countdown", "polynomial_multiplication", "puzzle24")},
    **{task: {"--{a}", "7 {a}"} for task in ("simple_integration", "intermediate_integration")},  # 7 -x, for -x
    "polynomial_equations": {"-{a}"},  # where it is 0.0
}
"""Task -> forms that a person would accept as the same answer."""
BY_FORM = {"boxnet", "rubiks_cube", "rush_hour"}
"""Tasks that come without a right answer; their forms are tested below."""


def _right(task: str, entry: dict[str, Any]) -> str | None:
    """An answer that is right: the gold one, or that of the metadata, or all premises, which follow from themselves."""
    if task == "propositional_logic":
        return " ∧ ".join(f"({premise})" for premise in entry["metadata"]["premises"])
    possible = entry["metadata"].get("possible_answer")
    return json.dumps(possible) if entry["answer"] is None and possible else entry["answer"]


def _paid_with_text(gym: ReasoningGymReward, task: str) -> list[tuple[str, str]]:
    problems = [reasoning_gym.create_dataset(task, size=12, seed=99)[i] for i in range(4)]
    golds = [_right(task, entry) for entry in problems]
    assert all(golds[:3]) or task in BY_FORM
    found = []
    for i in range(3):
        gold, other = golds[i], next((g for g in golds if g != golds[i]), None) or "12"
        if not gold:
            continue
        packed = pack(GymProblem(task, {}, problems[i]))
        answers = {
            f: f.replace("{q}", problems[i]["question"]).replace("{o}", other).replace("{a}", gold) for f in JUNK
        }
        completions = [f"<answer>{text}</answer>" for text in (gold, *answers.values())]
        right, *scores = gym(completions, [""] * len(completions), {COLUMN: [packed] * len(completions)})
        if right.value != 1.0:  # an integral that the generator could not solve is the question again
            assert "Integral" in gold, (gold, right)
            continue
        found += [(f, gold) for f, s in zip(answers, scores, strict=True) if s.value is None or s.value >= 1.0]
    return found


@pytest.mark.parametrize("task", _tasks(QUICK_WITH_TEXT))
def test_the_right_answer_is_not_paid_with_anything_around_it(gym: ReasoningGymReward, task: str) -> None:
    assert [(form, gold) for form, gold in _paid_with_text(gym, task) if form not in MEANT.get(task, set())] == []


@pytest.mark.parametrize(
    ("task", "answer", "fault"),
    [
        ("rush_hour", "F+1 K+1 M-1", ""), ("rush_hour", "I move F+1 K+1", "text beside the answer"),
        ("rubiks_cube", "F R' U2 Lw", ""), ("rubiks_cube", "F a1b R'", "text beside the answer"),
        ("boxnet", '[{"Agent[0.5, 0.5]": "move(box_blue, square[0.5, 1.5])"}]', ""),
        ("boxnet", '[{"Agent[0.5, 0.5]": "move(box_blue, target_blue)", "junk": "junk"}]', "no order to an agent"),
        ("boxnet", '{"a": 1}', "no list of orders in JSON"), ("boxnet", "[" * 100_000, "no list of orders in JSON"),
    ],
)  # fmt: skip
def test_tasks_without_an_answer_of_their_own_are_guarded_by_form(task: str, answer: str, fault: str) -> None:
    assert objection(task, answer, {"answer": None, "metadata": {}}) == fault


def test_parts_that_must_not_be_right_alone() -> None:
    assert list(enough("chain_sum", "12")) == []
    assert list(enough("chain_sum", "12, 12")) == ["12"]
    assert list(enough("chain_sum", "77")) == ["7"]
    assert list(enough("sokoban", "LUR")) == ["L", "L U"]
