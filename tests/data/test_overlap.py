"""Repeats and shared n-grams between the splits."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_pl.data.overlap import find_overlaps, n_grams, refuse_repeats
from grpo_pl.types import Problem

STORY = "A farmer has 12 cows and buys 5 more at the market on a cold Monday morning."


def _prompts(*questions: str) -> list[Problem]:
    return [Problem(id=i, question=question, answer="1") for i, question in enumerate(questions)]


def test_n_grams_by_hand() -> None:
    assert n_grams("One, two  THREE", 3) == {hash(("one", ",", "two")), hash((",", "two", "three"))}
    assert n_grams("one two", 3) == set()


def test_repeats_ignore_case_and_spaces_and_near_copies_share_n_grams() -> None:
    train = _prompts(f"First: {STORY} How many?", "  1 +  1 ")
    held_out = {"val": _prompts("1 + 1", STORY, "3 + 4"), "val/other": _prompts("What is 7?")}
    found = find_overlaps(train, held_out)
    assert [p.question for p in found["val"].repeated] == ["1 + 1"]
    assert [p.question for p in found["val"].alike] == [STORY]
    assert not found["val/other"].repeated
    assert not found["val/other"].alike
    assert str(found["val"]) == ("1 of 3 held-out problems share 13 words in a row with a training problem (ids 1).")
    with pytest.raises(ValueError, match=r"1 of 3 problems of val are training problems as well, such as '1 \+ 1'"):
        refuse_repeats(found)


def test_problems_without_a_question_repeat_none() -> None:
    assert not find_overlaps(_prompts("", " "), {"val": _prompts("", "?")})["val"].repeated


ARITHMETIC = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"


def _rows(questions: list[str]) -> list[dict[str, str]]:
    return [{"question": question, "answer": "2"} for question in questions]


def _table(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": "grpo_pl.data.tables.TablePrompts", "init_args": {"path": path, **arguments}}


@pytest.mark.parametrize("verb", ["fit", pytest.param("validate", marks=pytest.mark.slow)])
@pytest.mark.parametrize("made_up", [False, True])
def test_a_validation_set_that_repeats_training_questions_is_refused_unless_allowed(
    command_line: Any, jsonl: Callable[..., str], verb: str, made_up: bool
) -> None:
    numbers = [f"{i}+{i}=" for i in range(9)]
    if made_up:  # the same sums, others of them held out
        source, more = ({"class_path": ARITHMETIC, "init_args": {"digits": 1, "seed": seed}} for seed in (0, 1))
    else:
        source = _table(jsonl(_rows([*numbers, "1+2="])), val_share=0.4)
        more = _table(jsonl(_rows(numbers[:3]), "b.jsonl"), train_split="train", val_split="train")
    config = command_line.config(
        f"overlap-{verb}-{made_up}",
        data__source=source,
        data__validation_sets={"more": more},
        data__val_prompts=8,
        data__steps=3,
        data__prompts_per_step=24 if made_up else 1,
        model__cold_start=None,
    )
    done = command_line(verb, f"--config={config}")
    assert done.status == 1
    assert "problems of val/more are training problems as well, such as '" in done.err
    assert "remove them, or set data.allow_overlap to true" in done.err
    if not made_up:
        command_line.done(verb, f"--config={config}", "--data.allow_overlap=true", "--data.steps=1")


def test_likeness_is_a_note_that_names_the_set_and_the_problems(command_line: Any, jsonl: Callable[..., str]) -> None:
    train = ["1+2+3+4+5+6+7=", "1+1=", "2+2="]  # thirteen words, and the equals sign
    source = _table(jsonl(_rows(train)), val_path=jsonl(_rows(["3+3=", "9-1+2+3+4+5+6+7"]), "val.jsonl"))
    config = command_line.config("alike", data__source=source, model__cold_start=None)
    done = command_line.done("validate", f"--config={config}", "--data.prompts_per_step=1")
    note = "val: 1 of 2 held-out problems share 13 words in a row with a training problem (ids 1)."
    assert note in done.err.splitlines()
