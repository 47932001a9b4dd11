"""The teacher's question: texts by name, left out where there is nothing, around what the policy is asked."""

import pytest

from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.rewards import ExactReward
from grpo_pl.types import Problem

PROBLEM = Problem(id=1, question="2+2=", answer="4", columns={"solution": "two and two", "empty": "", "number": 7})


def test_columns_and_texts_of_the_rollout_stand_where_they_are_named() -> None:
    text = PrivilegedText(
        user="{privileged}\nQ: {question} in \\boxed{}", texts=["S: {solution} ({number}); ", "{best}"]
    )
    assert text.asked(PROBLEM, {"best": "4!"}) == "S: two and two (7); 4!\nQ: 2+2= in \\boxed{}"
    assert PrivilegedText(texts=["{answer}"]).asked(PROBLEM) == "2+2=\n\n4"
    assert text.names == {"solution", "number", "best"} and text.columns == {"solution", "number"}


def test_what_is_put_in_is_not_read_again() -> None:
    problem = Problem(id=1, question="{privileged}?", answer="", columns={"solution": "{question} {right}"})
    assert PrivilegedText().asked(problem, {"right": "no"}) == "{privileged}?\n\n{question} {right}"


def test_a_text_with_nothing_for_one_of_its_names_is_left_out() -> None:
    text = PrivilegedText(texts=["A {right}.", "B {feedback} {solution}."])
    assert text.asked(PROBLEM, {"right": "4"}) == "2+2=\n\nA 4."
    assert text.asked(PROBLEM, {"feedback": "no"}) == "2+2=\n\nB no two and two."
    assert text.asked(PROBLEM, {"feedback": "", "right": ""}) is None
    assert PrivilegedText(texts=["{empty}"]).asked(PROBLEM) is None


def test_the_last_turn_of_a_conversation_gets_the_text() -> None:
    turns = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="})
    problem = Problem(id=1, question="2+2=", answer="4", messages=turns)
    asked = PrivilegedText(texts=["{answer}"]).asked(problem)
    assert asked == (turns[0], {"role": "user", "content": "2+2=\n\n4"})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"user": "{question}"}, r"must contain '\{privileged\}'"),
        ({"user": "{privileged}"}, r"must contain '\{question\}'"),
        ({"texts": ["Think hard."]}, "'Think hard.' names nothing"),
        ({"texts": []}, "names nothing"),
    ],
)
def test_a_template_without_its_places_is_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PrivilegedText(**fields)  # type: ignore[arg-type]


def test_a_column_that_no_problem_has_and_a_reward_that_is_not_there_are_refused() -> None:
    rewards = [ExactReward(correctness=True)]
    PrivilegedText().check_columns([PROBLEM], rewards)
    with pytest.raises(ValueError, match=r"names \{sollution\}.*there are: empty, number, solution"):
        PrivilegedText(texts=["{sollution}"]).check_columns([PROBLEM], rewards)
    with pytest.raises(ValueError, match="feedback_of is 'math', and the rewards are exact"):
        PrivilegedText(texts=["{feedback}"], feedback_of="math").check_columns([PROBLEM], rewards)
