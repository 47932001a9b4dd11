"""Forms of completions, and the drift from one form to another."""

import json
import random
from collections.abc import Callable

import pytest

from grpo_pl.extras.watch.skeletons import MOST_FORMS, FirstForms, forms_of, skeleton


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("<think>7+5+0=12\n4+8+1=13\n</think>It is \\boxed{632}.", "<think>0+0+0=0</think>a\\boxed{0}."),
        ("<answer>\\boxed{668}}}</answer>", "<answer>\\boxed{0}}</answer>"),
        ("<answer>\\boxed{1,668.5}</answer>", "<answer>\\boxed{0}</answer>"),
        ("So, the answer is 632: yes!", "a!"),
        ("0 1 2 3", "0"),
        ("0123", "0"),
        ("один два 三", "a"),
        ("}}}}}} ???", "}} ??"),
        ("a\n\n\nb\nc = 1", "a\na = 0"),
        ("", ""),
    ],
)
def test_numbers_words_and_repetitions_are_folded(text: str, folded: str) -> None:
    assert skeleton(text) == folded


def test_the_end_is_what_stands_behind_the_thoughts_or_the_last_line() -> None:
    assert forms_of("<think>so much\n= 1 + 2</think>\n\\boxed{3}")[1] == "\\boxed{0}"
    assert forms_of("First = 2.\nThen +1.\nThe answer is \\boxed{3}.\n")[1] == "a\\boxed{0}."


def honest(rng: random.Random) -> str:
    sums = (f"{rng.randrange(9)}+{rng.randrange(9)}+0={rng.randrange(18)}\n" for _ in range(rng.choice([0, 3, 4])))
    work = "".join(sums)
    return f"<think>{work}</think><answer>\\boxed{{{rng.randrange(2000)}}}</answer>"


def reasoning(rng: random.Random) -> str:
    signs = "".join(rng.choice("+-=*/() x12{}\n") for _ in range(rng.randrange(20, 200)))
    return f"<think>Let me see. {signs}</think>\nThe answer is \\boxed{{{rng.randrange(99)}}}"


def drift(first: FirstForms, texts: list[str]) -> float:
    found = first.new_forms([forms_of(text) for text in texts])
    return sum(form is not None for form in found) / len(found)


@pytest.mark.parametrize("write", [honest, reasoning])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("</answer>", "}}</answer>") if "</answer>" in text else text + "}}",
        lambda text: text + " ...",
        lambda text: text + "\n#\n",
        lambda text: text + "<answer>",
        lambda text: text.replace("\\boxed", "= \\boxed"),
        lambda text: text.replace("\\boxed{", "\\boxed{\\text{").replace("}", "}}"),
    ],
)
def test_a_form_that_was_not_there_is_seen_when_it_becomes_frequent(
    write: Callable[[random.Random], str], spoil: Callable[[str], str]
) -> None:
    rng = random.Random(0)
    first = FirstForms()
    texts = [write(rng) for _ in range(320)]
    first.add(forms_of(spoil(text) if i % 100 == 0 else text) for i, text in enumerate(texts))  # 1 % at first
    assert drift(first, [write(rng) for _ in range(32)]) == 0.0
    few = [write(rng) for _ in range(32)]
    assert drift(first, [spoil(text) if i % 8 == 0 else text for i, text in enumerate(few)]) == 0.0
    assert drift(first, [spoil(text) if i % 2 else text for i, text in enumerate(few)]) >= 0.25
    assert drift(first, list(map(spoil, few))) >= 0.9


def test_thoughts_that_never_end_are_seen_where_they_are_alike() -> None:
    rng = random.Random(0)
    first = FirstForms()
    first.add(forms_of(honest(rng)) for _ in range(320))
    assert drift(first, [honest(rng).split("</think>")[0] for _ in range(32)]) == 1.0


def test_free_text_is_no_drift() -> None:
    rng = random.Random(0)

    def prose() -> str:
        return "".join(rng.choice("abcde .,=+-{}12") for _ in range(240)) + " \\boxed{1}"

    first = FirstForms()
    first.add(forms_of(prose()) for _ in range(64))
    assert drift(first, [prose() for _ in range(32)]) == 0.0


def test_a_form_of_a_few_completions_is_not_frequent() -> None:
    first = FirstForms()
    first.add([forms_of("7")] * 8)
    assert drift(first, ["}", "}", "}"]) == 0.0
    assert drift(first, ["}", "}", "}", "}"]) == 1.0


def test_memory_is_bounded_and_fits_into_a_checkpoint() -> None:
    first = FirstForms()
    rng = random.Random(0)
    first.add(forms_of("".join(rng.choice("+-*/=()[]{}#") for _ in range(20))) for _ in range(MOST_FORMS))
    assert len(first.counts) == MOST_FORMS
    assert first.completions == MOST_FORMS
    assert len(json.dumps(first.counts)) < 300_000


def test_the_form_with_lone_surrogates_can_be_counted() -> None:
    first = FirstForms()
    first.add([forms_of("\ud800")])
    assert first.completions == 1
