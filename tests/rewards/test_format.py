# ruff: noqa: E501

import importlib
import random

import pytest

from grpo_pl.rewards import ExactReward, FormatReward, boxed_or_block
from grpo_pl.rewards.format import format_failures, is_one_box

GOOD = "<think>2+2 is 4</think>\n<answer>\\boxed{4}</answer>"


def value(completion: str, **options: bool) -> float | None:
    return FormatReward(**options)([completion], [""], {})[0].value


def answered(block: str) -> str:
    return f"<think>x</think><answer>{block}</answer>"


@pytest.mark.parametrize(
    ("completion", "failure"),
    [
        ("2+2 is 4</think><answer>\\boxed{4}</answer>", "no think"),
        ("<think>2+2 is 4</think> \\boxed{4}", "no answer"),
        ("<think>2+2 is 4</think><answer>\\boxed{4}", "unclosed answer"),
        ("<think>2+2 is 4</think><answer>4</answer>", "no box"),
        ("<think>2+2 is 4</think><answer>\\boxed{4}}}</answer>", "text beside the box"),
        ("<think>2+2 is 4</think><answer>\\boxed{3}\\boxed{4}</answer>", "several boxes"),
        ("<think>2+2 is 4</think>So <answer>\\boxed{4}</answer>", "text outside the blocks"),
        ("<think>2<think>+2</think><answer>\\boxed{4}</answer>", "tags repeated or out of order"),
    ],
)
def test_each_failure_is_named_and_worth_nothing(completion: str, failure: str) -> None:
    assert format_failures(completion) == [failure]
    score = FormatReward()([completion], [""], {})[0]
    assert score.value == 0.0
    assert score.detail == failure


def test_the_demanded_form_is_worth_one() -> None:
    assert value(GOOD) == 1.0
    assert value(GOOD, partial=True) == 1.0
    assert value(f" {GOOD}\n") == 1.0
    assert value(answered("\n\\boxed {\\frac{1}{2}}\n")) == 1.0
    assert value(answered("\\boxed{\\{1, 2\\}}")) == 1.0
    for other in (GOOD + " Done.", GOOD + GOOD, "<answer>\\boxed{4}</answer><think>late</think>"):
        assert value(other) == 0.0


BESIDE = [
    "\\boxed{668}}}", "{\\boxed{668}", "{\\boxed{668}}", "$\\boxed{668}$", "The answer is \\boxed{668}",
    "\\boxed{668}.", "\\boxed{668}\u200b", "\\boxed{668}｝", "\\boxed{668}\\}", "0\\boxed{668}",
]  # fmt: skip


@pytest.mark.parametrize("block", BESIDE)
def test_what_stands_beside_the_box_counts_unless_text_is_allowed(block: str) -> None:
    assert not is_one_box(block)
    assert value(answered(block)) == 0.0
    assert value(answered(block), partial=True) == 0.75
    assert value(answered(block), allow_text=True) == 1.0
    assert value(answered(block), allow_text=True, partial=True) == 1.0


@pytest.mark.parametrize(
    "block", ["", "\\boxed{}", "\\boxed{4", "4}", "\\boxed4", "\\boxed{3} \\boxed{4}", "\\boxed{\\boxed{4}}"]
)
def test_the_answer_is_one_box_even_where_text_is_allowed(block: str) -> None:
    for allow_text in (False, True):
        assert value(answered(block), allow_text=allow_text) == 0.0
        assert value(answered(block), allow_text=allow_text, partial=True) == 0.75


NOTHING = [
    "", " ", "\u200b", "\u200c\u200d", "\ufeff", "\u2060", "\u00ad", "\u202e", "\u061c", "\u180e", "\ufe0f", "\u034f", "\u115f", "\u1160",
    "\u3164", "\uffa0", "\u2800", "\u3000", "\u00a0", "\u2003", "\u2028", "\x00", "\x7f", "\ue000", "\ud800", "\U000e0041", "\u0301",
    "\\,", "\\;", "\\:", "\\!", "\\ ", "\\>", "\\/", "~", "{}", "{{} {}}", "\\quad", "\\qquad\\quad", "\\text{}", "\\text{ }",
    "\\text{\u200b}", "\\mathrm{\\,}", "\\mbox{}", "\\phantom{5}", "\\hphantom{x}", "\\vphantom{1}", "\\hspace{1cm}", "\\hspace*{2em}",
    "\\enspace", "\\thinspace", "\\null", "\\relax", "\\strut", "$$", "$ $", "\\(\\)", "\\[ \\]", "\\\\", "\\textbf{\\textit{}}",
    "\\color{red}", "^{}", "_{}^{}", "\\displaystyle", "\\operatorname{}", "\\sqrt{}", "\\frac{}{}", "\\,\u200b~\\text{ \\; }",
    "\\phantom5", "\\phantom 5", "\\phantom\\pi", "\\hphantom{\\frac{1}{2}}", "\\vphantom{\\text{a {b} c}}\\,", "\\hskip 3pt",
    "\\hskip-.5em", "\\kern3pt", "\\mskip 3mu plus 1fil minus 2mu", "\\mkern 18mu", "\\vskip1cm", "\\small", "\\Large{}", "\\tiny\\,",
    "\\scriptsize{ }", "\\bfseries", "\\itshape{}", "\\normalfont", "\\raisebox{2pt}{}", "\\llap{}", "\\begin{aligned}\\end{aligned}",
    "\\begin{array}{cc} & \\\\ & \\end{array}", "\\textcolor{red}{}", "\\color[rgb]{1,0,0}",
]  # fmt: skip
SOMETHING = [
    "0", "x", "\\pi", "\\{\\}", "\\emptyset{}", "\\text{yes}", "\\frac{}{2}", "\\%", "-", "∅", "和", "е\u0301", "\u200b5", "\\sqrt{}3",
    "\\quadx", "\\textit{no}", "\\infty", "()", "[]", ".", "½", "€",
    "\\phantom5 5", "\\phantom{5}x", "\\hskip 3pt 5", "\\kern3pt4", "3pt", "\\smallx", "\\small 5", "\\phantoms", "small", "\\textcolor{red}{5}",
    "\\raisebox{2pt}{5}", "\\begin{cases}1\\end{cases}", "\\hphantom{1}2",
]  # fmt: skip


@pytest.mark.parametrize("nothing", NOTHING)
def test_a_box_in_which_nothing_can_be_seen_does_not_count(nothing: str) -> None:
    block = answered(f"\\boxed{{{nothing}}}")
    assert value(block) == value(block, allow_text=True) == 0.0
    assert value(block, partial=True) == 0.75
    assert value(answered(nothing), require_box=False) == 0.0
    assert boxed_or_block(block) == boxed_or_block(answered(nothing)) == ""
    assert ExactReward()([block], [nothing or "5"], {})[0].value in (0.0, None)


@pytest.mark.parametrize("something", SOMETHING)
def test_a_box_in_which_something_can_be_seen_counts(something: str) -> None:
    assert value(answered(f"\\boxed{{{something}}}")) == 1.0
    assert boxed_or_block(f"\\boxed{{{something}}}") == something


def test_a_task_of_version_0_2_imports_the_reader_of_answers_from_where_it_was() -> None:
    assert importlib.import_module("grpo_pl.rewards.places").boxed_or_block is boxed_or_block


def test_a_box_is_asked_for_on_demand_and_within_the_answer() -> None:
    assert value(answered("4 is it"), require_box=False) == 1.0
    assert value(answered(" "), require_box=False) == 0.0
    assert format_failures("<think>\\boxed{4}</think><answer>4</answer>") == ["no box"]
    assert value("<think>x</think>\\boxed{4}<answer>4</answer>") == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("\\boxed{4}", 0.0), ("<think>x", 0.25), ("<think>x</think>", 0.5),
        ("<think>x</think><answer>\\boxed{4}", 0.75), ("<think>x</think><answer>4</answer>", 0.75),
        ("<think><think></think><answer>\\boxed{4}</answer>", 0.75),
        ("</answer><answer>\\boxed{4}</think><think>", 0.25),
        # an answer within a thought
        ("<think><answer>\\boxed{4}</answer>", 0.25), ("<think><answer>\\boxed{4}</answer></think>", 0.5),
        # junk
        ("a<think>x</think><answer>\\boxed{4}</answer>", 0.75), ("<think>x</think>a<answer>\\boxed{4}</answer>", 0.5),
        ("<think>x</think><answer>\\boxed{4}</answer>a", 0.75), ("a<think>x</think><answer>\\boxed{4}</answer>a", 0.5),
        ("a<think>x</think>b<answer>\\boxed{4}</answer>c", 0.0),
        ("a<think>x</think>b<answer>c\\boxed{4}}}d</answer>e", 0.0), ("a<think>x</think>b<answer></answer>e", 0.0),
        # junk where a tag is missing
        ("a<think>x</think><answer>\\boxed{4}", 0.5), ("a<think>x</think>b", 0.0),
        ("<think>x</think><answer>\\boxed{4}", 0.75),
    ],
)  # fmt: skip
def test_partial_credit_counts_tags_in_place_with_nothing_outside_of_them(completion: str, expected: float) -> None:
    assert value(completion, partial=True) == expected


def test_partial_credit_is_full_exactly_where_the_strict_form_is_kept() -> None:
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{4}", "}", "a", " ", "\n", "{"]
    rng = random.Random(0)
    full = 0
    for _ in range(5_000):
        ours = ["<think>", "</think>", "<answer>", "\\boxed{4}", "</answer>"]
        for _ in range(rng.randrange(3)):
            ours.insert(rng.randrange(len(ours) + 1), rng.choice(pieces))
        for allow_text in (False, True):
            strict = value("".join(ours), allow_text=allow_text)
            assert (value("".join(ours), allow_text=allow_text, partial=True) == 1.0) == (strict == 1.0)
            full += strict == 1.0
    assert full > 1000
