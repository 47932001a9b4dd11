"""Classes of answers: what must be paid and what must not, through the command line, by repetition and by mutation."""

# ruff: noqa: E501

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_pl.cli.main import main
from grpo_pl.rewards import MathReward
from grpo_pl.rewards.mathematics.written_numbers import read_number

DATA = Path(__file__).parent / "data"


@pytest.mark.usefixtures("reward")  # whose workers judge here as well, for its limits are equal
@pytest.mark.parametrize(
    ("rows", "rewards"),
    [
        ("answer_classes", "answer_classes"),
        pytest.param("hand_written_pairs", "answer_classes", marks=pytest.mark.slow),
        ("reward_classes", "reward_classes"),
    ],
)
def test_the_classes_are_judged_as_expected_by_the_command_line(tmp_path: Path, rows: str, rewards: str) -> None:
    """``grpo-pl score`` exits 1 if an expectation is not met."""
    if rewards == "reward_classes":
        pytest.importorskip("reasoning_gym")
    command = ["score", str(DATA / f"{rows}.jsonl"), "--config", str(DATA / f"{rewards}.yaml")]
    assert main([*command, "--output", str(tmp_path / "scores.jsonl")]) == 0
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) > 150


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_pairs_written_by_hand_are_judged_as_expected(reward: MathReward, every: int) -> None:
    lines = (DATA / "hand_written_pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[::every]]
    scores = reward([row["completion"] for row in rows], [row["answer"] for row in rows], {})
    assert len(rows) > 800 / every
    assert [row for row, score in zip(rows, scores, strict=True) if score.value != row["expected"]] == []


SHAPES: list[str] = [
    "{a}", "-{a}", "{a}.{b}", "{a},{b}", "{a}/{c}", r"\frac{{{a}}}{{{c}}}", r"{a}\%", r"\${a}.50", "€{a}", "{a} €", "{a}:{t}",
    "{a}:{c}", "{c}:{a}:{t}", "f({a})<f({c})<f({t})", "f({c})>f({a})", "{c} < x < 9{t}", r"x \le {a}", r"x \neq {a}",
    r"\{{{a}, -{c}\}}", "({a}, {c})", "[{a}, 9{c})", r"(-\infty, {a}]", r"\begin{{pmatrix}}{a}&{c}\\{t}&1\end{{pmatrix}}",
    "20{t}-0{d}-1{d}", "{d} March 19{t}", "H_{d}SO_{d}", r"\text{{C}}_{d}\text{{H}}_{c}", r"Fe^{{{d}+}}", "Na^+", "O(n^{d})",
    "{a} apples", r"{a}\text{{ km/h}}", r"{a}^\circ", "{a} °C", r"{a}\text{{ million}}", r"{a}\text{{ cm}}^2", "{c}01_{d}",
    r"x={a}, y={c}", r"(x, y) = ({a}, {c})", "y = {a}x + {c}", "x^2+{a}y={c}", r"\sqrt{{{a}}}", r"{a}\sqrt{{{c}}}", "2^{{{a}}}",
    "{c}!", r"\binom{{{a}}}{{{d}}}", r"{a}\pi", r"{a}+{c}i", r"e^{{{a}x}}", r"\log_2 {a}", r"\sin {a}x", r"{a}\cdot {c}",
    r"\int_0^{{{a}}} f(x)\,dx", r"\sum_{{k=1}}^{{{a}}} k", r"\lim_{{x\to {a}}} g(x)", r"x\approx {a}.{t}", r"\pm {a}",
    r"\text{{no, because }} {a} > {c}", r"\text{{room }} {a}", "Yes.", "No solution", r"\text{{Île-de-France}}", "XIV", "AB", "ABC",
    r"A \cap B", r"x \in \mathbb{{R}}", r"1, 2, \ldots, {a}", r"{a} \equiv {c} \pmod{{{t}}}", r"0.\overline{{{a}}}",
    r"\overline{{AB}} = {a}", r"\angle ABC = {a}^\circ", "a:b:c = {a}:{c}:{t}", "{a} {t} {c}", "|x-{a}| < {c}", r"|x-{a}|",
    r"\text{{(A)}}", "A, C", r"\text{{A}} \to \text{{B}}", "10:{t} a.m.", r"\neg p", "{a} – {c}", "№{a}", "日曜日", "да",
]  # fmt: skip


def golds(rng: random.Random, count: int) -> list[str]:
    """Gold answers of every shape, with numbers drawn afresh."""
    numbers = lambda: {  # noqa: E731
        "a": rng.randint(2, 99), "b": rng.randint(11, 99), "c": rng.randint(2, 9), "d": rng.randint(2, 9),
        "t": rng.randint(10, 59),
    }  # fmt: skip
    return [SHAPES[i % len(SHAPES)].format(**numbers()) for i in range(count)]


def test_a_gold_answer_repeated_letter_by_letter_is_right(reward: MathReward) -> None:
    repeated = golds(random.Random(0), len(SHAPES))
    scores = reward([f"so \\boxed{{{gold}}}." for gold in repeated], repeated, {})
    assert [(g, s.status) for g, s in zip(repeated, scores, strict=True) if s.value != 1.0] == []
    assert [fault for fault in reward.gold_faults(repeated) if fault] == []


NOTATIONS = [
    r"\langle 1,2\rangle", r"\binom52", "_5C_2", "{}_5C_2", "^5P_2", r"\dot x", r"\ddot{x}", r"0.1\dot 6", r"\lVert v\rVert", r"\Vert x\Vert",
    r"^{14}_6C", r"\odot O", r"\oint_C F\cdot dr", r"\iint_D f\,dA", r"|\psi\rangle", r"\langle\psi|", r"\begin{cases}1&x>0\\0&x\le0\end{cases}",
    r"5 \choose 2", r"\acute a", r"\partial x", r"\overset{\frown}{AB}", r"\xrightarrow{a}", r"45\degree", r"\arg z", r"\ker T", r"\dim V=3",
    r"\operatorname{span}\{v\}", r"\max\{a,b\}", r"x^\frac12", r"\therefore x=5", r"\textcolor{red}{5}", r"\bigcup_{i}A_i", r"a\bullet b",
    r"a\ll b", r"a\nmid b", r"A\subsetneq B", r"\operatorname{sgn}(x)", r"\llbracket1,n\rrbracket", r"\bigcirc", "<", "=", "+", r"\times", r"\le",
]  # fmt: skip
"""What a person can read and a parser cannot."""


def test_a_gold_answer_that_only_a_person_can_read_can_be_repeated(reward: MathReward) -> None:
    assert [(g, fault) for g, fault in zip(NOTATIONS, reward.gold_faults(NOTATIONS), strict=True) if fault] == []
    scores = reward([f"\\boxed{{{gold}}}" for gold in NOTATIONS], NOTATIONS, {})
    assert [gold for gold, score in zip(NOTATIONS, scores, strict=True) if score.value != 1.0] == []
    others = reward(["\\boxed{17}"] * len(NOTATIONS), NOTATIONS, {})
    assert {(score.value, score.status) for score in others} == {(0.0, "wrong")}


FAULTY = [
    r"\frac{}{2}", r"\sqrt{}", r"\int", "^2", "_5", "(5", "[1,2", "?", r"\frac{", r"\frac{1}", "5+", "NaN", "{5",
    "5}", "", "  ", r"\frac{1}{0}", r"\sqrt{", "x^", "3 *", "5\0", "5\u200f", "9" * 5000, "10^{10^{10^{10}}}+x",
]  # fmt: skip
ANSWERS = [
    "5", r"\text{yes}", "x=1, y=2", r"5\text{ or 6}", "12:00", r"\{1,2\}", "x>3", "2024-03-12", "101_2",
    r"\infty+1",
]  # fmt: skip


@pytest.mark.parametrize("gold", FAULTY)
def test_no_answer_is_wrong_against_a_gold_answer_that_is_flagged(reward: MathReward, gold: str) -> None:
    assert reward.gold_faults([gold])[0]
    scores = reward([f"\\boxed{{{answer}}}" for answer in ANSWERS], [gold] * len(ANSWERS), {})
    assert {(score.value, score.status) for score in scores} == {(None, "bad_gold")}


def test_what_stands_beside_the_box_is_reported(reward: MathReward) -> None:
    completions = [
        r"<answer>\boxed{668}}}</answer>",
        r"<answer>I say \boxed{668}</answer>",
        r"<answer> \boxed{668} </answer>",
        r"I say \boxed{668}}",
    ]
    scores = reward(completions, ["668"] * 4, {})
    assert [s.value for s in scores] == [1.0] * 4
    assert [s.detail for s in scores] == ["668: beside the box: }}", "668: beside the box: I say", "668", "668"]


def _other_digit(text: str, rng: random.Random) -> str:
    places = [m.start() for m in re.finditer(r"\d", text)]
    if not places:
        return ""
    at = rng.choice(places)
    return text[:at] + rng.choice([d for d in "123456789" if d != text[at]]) + text[at + 1 :]


def _behind(*endings: str) -> Callable[[str, random.Random], str]:
    return lambda text, rng: text + (rng.choice(endings) if len(endings) > 1 else endings[0])


MUTATIONS: dict[str, Callable[[str, random.Random], str]] = {
    "another digit": _other_digit,
    "another sign": lambda t, rng: "-" + t if re.match(r"\d|\\(?!pm|text|neg|angle)", t) else "",
    "another magnitude": _behind(r"\text{ thousand}", r"\text{ Milliarden}", " million", r"\text{ dozen}"),
    "a second answer": _behind(r"\text{ or 1234}", r", 1234", r"\text{, not 1234}", r" or 1234"),
    "a remark": _behind(r"\text{ is wrong}", r"\text{ not}", r"\text{no}", r"\text{ or less}"),
    "work": _behind(r"+1234", r"\cdot 1234", r"-1234", r"^{1234}"),
    "another base": _behind("_{11}"),
    "a derivative": lambda t, rng: rf"\frac{{d({t})}}{{dx}}" if "x" not in t else "",
    "another unit": lambda t, rng: t + r"\text{ kg}" if re.search(r"text|apples|°|circ|[€$%]", t) else "",
    "infinite": _behind(r"\infty"),
    "a relation": _behind("=1234"),
    "another number": lambda t, rng: str(rng.randint(10**5, 10**6)),
    "another word": lambda t, rng: rng.choice([r"\text{maybe}", "perhaps", r"\text{B}\text{A}", "IX", "on"]),
    "a box": lambda t, rng: rf"1234\boxed{{{t}}}",
    "look-alikes": _behind("｝+｛1"),
}


def _same_by_accident(gold: str, answer: str) -> bool:
    """True where a mutation left the value as it was: -0, a date with the digits of a quotient, a longer period."""
    ours, theirs = read_number(gold), read_number(answer)
    return answer in ("", gold) or (ours is not None and theirs is not None and ours.value == theirs.value)


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_mutation_of_a_gold_answer_is_paid(reward: MathReward, count: int) -> None:
    """Pairs that mean different things: none may be taken for the same."""
    rng = random.Random(13)
    names = list(MUTATIONS)
    pairs: list[tuple[str, str, str]] = []
    while len(pairs) < count:
        name = names[len(pairs) % len(names)]
        gold = golds(rng, len(SHAPES))[rng.randrange(len(SHAPES))]
        answer = MUTATIONS[name](gold, rng)
        if not _same_by_accident(gold, answer):
            pairs.append((name, gold, answer))
        else:
            names = names[1:] + names[:1]
    scores = reward([f"\\boxed{{{answer}}}" for _, _, answer in pairs], [gold for _, gold, _ in pairs], {})
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score.value == 1.0] == []
