"""Word problems: answers worked out again from the text, wordings and numbers that no split shares."""

import random
import re
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest

from grpo_pl.data.tasks import wordings
from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.rewards import MathReward
from grpo_pl.types import Problem

PARTS = ("numbers", "wordings", "two_step")
IN_ORDER_OF_THE_TEXT = {  # of each verb: what to do with the numbers as they stand in the text
    **dict.fromkeys(["gets", "puts", "buys", "own", "finds", "ride", "plays", "add", "climbs", "counted"], "x + y"),
    **dict.fromkeys(["grew", "arrive", "displays", "measures", "combine"], "x + y"),
    **dict.fromkeys(["lost", "broke", "needs", "sold", "perch", "leaks", "baked"], "x - y"),
    **dict.fromkeys(["gives", "scored"], "y - x"),
    **dict.fromkeys(["fills", "stand", "reads", "costs", "bring", "runs", "swims", "bear", "builds"], "x * y"),
    **dict.fromkeys(["sleep", "draws", "plants", "earns", "weighs", "covers"], "x * y"),
    **dict.fromkeys(["shares", "packed", "cuts", "wash", "form"], "x / y"),
    **dict.fromkeys(["pays", "split", "types", "seat"], "y / x"),
    "drops": "x + y - z",
    "carries": "x * y + z",
    "loads": "x * y - z",
    "mixes": "(x + y) / z",
    "sent": "x - y - z",
    "hold": "x + y + z",
    "ate": "(x - y) * z",
    "opens": "x * y + z",
    "travels": "x + y + z",
    "divides": "x / y + z",
}
OF_LANGUAGE = frozenset(
    ["a", "and", "by", "each", "for", "how", "in", "is", "many", "of", "others", "that", "the", "with"]
)
"""Words that any English question may have."""


@cache
def training(count: int = 3000) -> list[Problem]:
    source = WordProblems()
    return [problem for step in range(count // 100) for problem in source.prompts(step, count=100)]


@cache
def held_out(part: str) -> list[Problem]:
    return WordProblems(held_out=part).validation()  # type: ignore[arg-type]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def words(texts: list[str]) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", " ".join(texts)).lower()))


def test_each_answer_is_what_the_text_asks_for() -> None:
    asked = [*training(), *(problem for part in PARTS for problem in held_out(part))]
    assert {problem.columns["wording"] for problem in asked} == IN_ORDER_OF_THE_TEXT.keys()
    for problem in asked:
        given = dict(zip("xyz", map(Fraction, numbers(problem.question)), strict=False))
        value = eval(IN_ORDER_OF_THE_TEXT[problem.columns["wording"]], {}, given)
        assert value == int(problem.answer), problem
        assert min(given.values()) >= 2 and value >= 2  # so that every noun is a plural
        assert value == numbers(problem.columns["steps"])[-1]


def test_a_problem_by_hand() -> None:
    (problem,) = [p for p in training() if p.columns["wording"] == "loads"][:1]
    a, b, c = numbers(problem.question)
    assert re.fullmatch(
        rf"A farmer loads {a} boxes of {b} (\w+) each\. Then {c} \1 go bad\. How many good \1 are left\?",
        problem.question,
    )
    assert problem.columns["steps"] == f"{a} * {b} = {a * b}; {a * b} - {c} = {a * b - c}"


@pytest.mark.parametrize(("largest", "table"), [(20, 9), (12, 5)])
def test_numbers_stay_within_their_limits(largest: int, table: int) -> None:
    limits = {"largest": largest, "table": table}
    asked = [problem for part in PARTS for problem in WordProblems(held_out=part, **limits).validation()]  # type: ignore[arg-type]
    for problem in [*asked, *WordProblems(**limits).prompts(0, count=256)]:  # type: ignore[arg-type]
        for a, sign, b, result in worked(problem):
            if sign in "+-":
                assert max(a, result) <= largest, problem
            else:
                assert max(b, a if sign == "*" else result) <= table, problem


def test_a_problem_has_only_the_operations_that_are_asked_for() -> None:
    for part in PARTS:
        source = WordProblems(held_out=part, operations="+-*")  # type: ignore[arg-type]
        asked = [*source.validation(200), *source.prompts(0, count=200)]
        assert {sign for problem in asked for _, sign, _, _ in worked(problem)} == set("+-*"), part


def worked(problem: Problem) -> list[tuple[int, str, int, int]]:
    """Each step of the work: number, operation, number, result."""
    steps = (line.split() for line in problem.columns["steps"].split("; "))
    return [(int(a), sign, int(b), int(result)) for a, sign, b, _, result in steps]


def pairs(problems: list[Problem]) -> set[frozenset[int]]:
    return {frozenset((a, b)) for problem in problems for a, _, b, _ in worked(problem)}


def test_no_step_of_a_held_out_problem_has_two_numbers_of_a_training_step() -> None:
    seen = pairs(training(10_000))
    assert len(seen) > 150
    for part in PARTS:
        unseen = pairs(held_out(part))
        assert len(unseen) > 30 and not unseen & seen, part


def test_no_problem_is_in_two_splits_or_twice_in_one() -> None:
    splits = [held_out(part) for part in PARTS]
    assert [len(split) for split in splits] == [400, 400, 400]
    for key in ("id", "question"):
        held = [getattr(problem, key) for split in splits for problem in split]
        assert len(set(held)) == 1200
        assert not set(held) & {getattr(problem, key) for problem in training(10_000)}
    batch = WordProblems().prompts(3, count=256)
    assert len({problem.id for problem in batch}) == 256


def test_wordings_are_many_and_none_is_built_or_said_like_another() -> None:
    assert len(wordings.ONE_STEP) + len(wordings.TWO_STEPS) >= 24 and len(wordings.HELD_OUT) >= 8
    every = [*wordings.ONE_STEP, *wordings.TWO_STEPS, *wordings.HELD_OUT]
    assert len({wording.verb for wording in every}) == len(every)
    for wording in every:
        assert wording.verb in words([wording.text]), wording
    for set_ in (wordings.ONE_STEP, wordings.HELD_OUT):
        times = Counter(wording.steps for wording in set_)
        assert times["+"] == times["*"] and times["-"] == times["/"] and min(times.values()) >= 3


def test_held_out_wordings_share_no_name_noun_verb_or_build_with_training() -> None:
    seen = [*wordings.ONE_STEP, *wordings.TWO_STEPS]
    their_items = {item for wording in seen for item in wording.items} | set(wordings.TRAINING_ITEMS)
    people = [name for names in wordings.TRAINING_PEOPLE.values() for name in names]
    assert not set(people) & {name for names in wordings.HELD_OUT_PEOPLE.values() for name in names}
    said = words([wording.text for wording in seen]) | their_items | {wording.verb for wording in seen}
    other = words([wording.text for wording in wordings.HELD_OUT]) | set(wordings.HELD_OUT_ITEMS)
    assert said & other <= OF_LANGUAGE

    def build(text: str) -> str:
        """The order of placeholders and marks, and how the question begins."""
        last = re.split(r"[.,] ", text)[-1].split()
        return " ".join([*re.findall(r"\{\w+\}|[.,?:]", text), *last[:2]])

    assert not {build(wording.text) for wording in seen} & {build(wording.text) for wording in wordings.HELD_OUT}


def test_texts_are_whole_sentences_with_the_right_pronouns() -> None:
    she = {n for group in (wordings.TRAINING_PEOPLE, wordings.HELD_OUT_PEOPLE) for n in group["she"]}
    he = {n for group in (wordings.TRAINING_PEOPLE, wordings.HELD_OUT_PEOPLE) for n in group["he"]}
    assert not she & he
    with_pronouns = 0
    for problem in [*training(), *(problem for part in PARTS for problem in held_out(part))]:
        text = problem.question
        assert re.fullmatch(r"[A-Z\d][^{}]*[.?]", text) and "  " not in text, text
        assert not re.search(r"\b(\w+) \1\b", text), text
        pronouns = set(re.findall(r"\b(she|her|he|him|his)\b", text.lower()))
        if pronouns:
            with_pronouns += 1
            assert pronouns <= {"she", "her"} or pronouns <= {"he", "him", "his"}, text
            named = {word for word in re.findall(r"\w+", text) if word in she | he}
            assert named & (she if pronouns <= {"she", "her"} else he), text
    assert with_pronouns > 300


def test_as_many_training_problems_have_two_steps_as_asked_for() -> None:
    def share(problems: list[Problem]) -> float:
        return sum(";" in problem.columns["steps"] for problem in problems) / len(problems)

    assert share(training()) == pytest.approx(0.25, abs=0.03)
    assert share(WordProblems(two_step_share=0.0).prompts(0, count=100)) == 0.0
    assert share(WordProblems(two_step_share=1.0).prompts(0, count=100)) == 1.0
    assert share(held_out("two_step")) == 1.0 and share(held_out("numbers")) == share(held_out("wordings")) == 0.0
    assert WordProblems(held_out="two_step").prompts(0, count=8) == WordProblems().prompts(0, count=8)


def test_too_few_numbers_are_one_line() -> None:
    lacking = next(seed for seed in range(200) if not _products(seed))
    with pytest.raises(ValueError, match="raise largest"):
        WordProblems(seed=lacking, table=5, largest=10).validation()


def _products(seed: int) -> int:
    """How many products of 2 … 5 are held out."""
    source = WordProblems(seed=seed, table=5, largest=10)
    return sum(source._is_held_out((a, "*", b)) for a in range(2, 6) for b in range(a, 6))


def test_demonstrations_by_hand_and_the_answer_in_a_box() -> None:
    problem = Problem(id=0, question="", answer="37", columns={"steps": "4 * 12 = 48; 48 - 11 = 37"})
    said = WordProblems().demonstration(problem, random.Random(0))
    assert said == "4 * 12 = 48. 48 - 11 = 37. The answer is 37."
    said = WordProblems(boxed=True).demonstration(problem, random.Random(0))
    assert said == r"4 * 12 = 48. 48 - 11 = 37. The answer is \boxed{37}."
    assert [MathReward(answer_in=place).read(said).text for place in ("box", "last_number")] == ["37", "37"]
