"""Answer pairs with the outcome that a careful person would give, most of them beyond what the library says."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from grpo_pl.rewards import ExactReward, MathReward
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.mathematics.canonical import canonical
from grpo_pl.rewards.sandbox.pool import Verdict


def judge(reward: MathReward, gold: str, answer: str) -> float | None:
    return reward([f"so \\boxed{{{answer}}}"], [gold], {})[0].value


RIGHT = [
    # integers
    ("5", "5"), ("5", " 5 "), ("5", "+5"), ("-7", "−7"), ("5", "5."), ("5", "5.0"), ("7", "007"), ("1000", "1,000"),
    ("1000", "1{,}000"), ("1000", r"1\,000"), ("1000", "1 000"), ("1234567", "1,234,567"), ("5", "５"), ("5", "$5$"),
    ("5", r"\left(5\right)"), ("5", "{5}"),
    # fractions and mixed numbers
    ("1/2", "0.5"), ("0.5", "1/2"), (r"\frac{1}{2}", r"\dfrac12"), (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"\frac{1}{2}", "½"), (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"-\frac{3}{4}", r"\frac{3}{-4}"),
    (r"\frac{7}{2}", "3 1/2"), (r"\frac{7}{2}", r"3\frac{1}{2}"), (r"3\frac{1}{2}", "3.5"), (r"\frac{7}{2}", "3½"),
    # decimals
    (r"\frac{1}{3}", "0.333333"), (r"\frac{2}{3}", "0.666667"), ("1500", "1.5e3"), ("1500", r"1.5\times10^3"),
    (r"1.5\times10^{3}", r"1.50\cdot 10^{3}"), ("10^{-20}", r"1\times10^{-20}"), (".5", "0.5"), ("0.1", ".10"),
    # percentages: 50% is 0.5
    ("0.5", r"50\%"), (r"50\%", "0.5"), (r"50\%", r"\frac12"), ("12.5%", r"\frac{1}{8}"),
    (r"50\%", r"50 \text{ percent}"),
    # sets, tuples, intervals
    (r"\{1,2,3\}", r"\{3,2,1\}"), (r"\{1,2\}", "2,1"), ("1,2", r"1 \text{ and } 2"),
    (r"\{\frac12, 3\}", r"\{3, 0.5\}"), ("(1,2)", "(1, 2)"), ("(1,2,3)", r"\left(1,2,3\right)"),
    (r"(\frac{1}{2}, -3)", "(0.5,-3)"), ("[1,2)", r"\left[1,2\right)"), (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"), ("(1,2)", "1<x<2"), (r"\emptyset", "∅"), (r"\pm 2", "2, -2"),
    (r"1\pm\sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
    # matrices and vectors
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}0.5&1\end{pmatrix}", r"\begin{pmatrix}\frac12&1\end{pmatrix}"),
    # units
    (r"5 \text{ cm}", "5"), ("5", r"5 \text{ cm}"), (r"5 \text{ cm}", "5 cm"), (r"5\text{ meters}", "5 m"),
    (r"10 \text{ square meters}", r"10\,\mathrm{m}^2"), (r"60 \text{ mph}", r"60 \text{ miles per hour}"),
    (r"90^\circ", "90"), ("90", r"90^{\circ}"), (r"90^\circ", r"90 \text{ degrees}"), (r"\$5", "5"), ("5", r"\$5.00"),
    ("12", r"12 \text{ apples}"), (r"3\sqrt{2} \text{ m}", r"3\sqrt2"),
    # text answers
    (r"\text{Monday}", "Monday"), ("Monday", r"\text{monday.}"), (r"\text{no solution}", r"\text{No solution}"),
    ("B", r"\text{(B)}"), ("(B)", "B"), (r"\text{B}", r"\textbf{(B)}"), ("yes", "Yes"),
    ("New York", r"\text{New York}"),
    # pi, e, roots, logarithms
    (r"2\pi", "2π"), (r"2\pi", r"\pi\cdot 2"), (r"\frac{\pi}{4}", r"\frac14\pi"), (r"1/e", r"\frac{1}{\mathrm e}"),
    (r"e^{-1}", r"\frac{1}{e}"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"), (r"\sqrt{2}", "1.414214"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("2^{10}", "1024"), (r"\infty", "∞"), (r"-\infty", r"-\infty"),
    # expressions and equations
    ("x^2+1", "1+x^2"), ("x²+1", "x^2+1"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{x}{2}", "0.5x"), ("x", r"\frac{2x}{2}"),
    ("5", "x=5"), ("x=5", "5"), ("x=5", "x=5"), ("y=2x+1", "y=1+2x"), ("y=2x+1", "2x+1"), ("f(x)=x^2", "x^2"),
    ("5", "f(2)=5"), ("x^2+y^2=1", "y^2+x^2=1"), (r"x\le 3", "3 ≥ x"), ("x>3", r"(3,\infty)"), ("1+2i", "2i+1"),
    (r"\frac{1+i}{2}", "0.5+0.5i"), (r"\frac{1+i}{2}", r"\frac{1}{1-i}"),
    (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"), (r"e^{i\theta}", r"\cos\theta+i\sin\theta"), ("|3+4i|", "5"),
    ("z=1+i", "1+i"), (r"\sum_{i=1}^n i", r"\sum_{i=1}^{n} i"),
    (r"1\text{ hour }30\text{ minutes}", r"1\text{ hr }30\text{ min}"), (r"|x|", r"\left|x\right|"), ("a_1", "a₁"),
    # names: case, primes, indices
    ("R-r", "-r+R"), (r"\frac{M}{m+M}", r"\frac{M}{M+m}"), (r"\pi R^2", r"R^2\pi"), (r"\pi s^2", r"s^2\pi"),
    ("4tW^2", r"4\cdot W^2 t"), ("E=mc^2", "E=c^2m"), ("V/I", r"\frac{V}{I}"), ("I_1+I_2", "I_2+I_1"),
    ("e_1+1", "1+e_1"), (r"\gamma+1", r"1+\gamma"), (r"\Gamma(5)", "24"), ("f''(x)+1", r"1+f^{\prime\prime}(x)"),
    ("y''+y=0", "y+y''=0"), ("f'(2)+1", "1+f'(2)"), (r"\log_A B", r"\frac{\ln B}{\ln A}"),
    ("a:b:c = 45:5:54", "45:5:54"),
    # a noun beside the answer
    ("7", r"7\text{ real roots}"), ("6", r"6\text{ three-digit numbers}"), ("6", r"6\text{ slices of the pizza}"),
    (r"\text{odd}", r"\text{odd function}"), (r"\text{odd}", r"\text{an odd function}"),
    (r"\text{blue}", r"\text{the colour is blue}"), (r"\text{not even}", r"\text{not an even number}"),
    # conditions that exclude what has no value
    (r"\sqrt{x}", r"\sqrt{x}, x\ge 0"), (r"\frac{1}{x-2}", r"\frac{1}{x-2}, x\ne 2"), (r"\ln x", r"\ln x, x>0"),
    (r"\sqrt{x-100}", r"\sqrt{x-100}, x\ge 100"), (r"\frac{1}{\sqrt{4-x}}", r"\frac{1}{\sqrt{4-x}}, x<4"),
]  # fmt: skip
WRONG = [
    ("5", "6"), ("5", "-5"), ("5", "50"), ("1000", "1,00"), ("15", "1,5"), ("52", "5²"), ("312", "3½"),
    (r"\frac{1}{3}", "0.33"), (r"\frac{1}{3}", "0.3333"), ("10^{-21}", "10^{-20}"), ("10^{-20}", "0"),
    ("0", "10^{-20}"), ("1e-9", "2e-9"), (r"\pi\cdot10^{-9}", r"\pi\cdot10^{-8}"), ("50", r"50\%"), (r"50\%", "50"),
    ("5", "6=5"), ("5", "1=2=5"), ("5", "x+y=5"), ("5", "2x=10"), ("5", "5=x=6"), ("56088", r"123\cdot456"),
    ("56088", r"123\times 456"), ("56088", "123*456"), ("5", "2+3"), ("5", "8-3"), ("12", "84/7"),
    ("12", r"\frac{84}{7}"), ("120", "5!"), ("10", r"\binom{5}{2}"), ("1024", "2^{10}"), ("5", r"\sqrt{25}"),
    ("5", r"\sum_{i=1}^{5} 1"), (r"\frac12", r"\int_0^1 x dx"), ("3", r"12345678 \bmod 5"),
    (r"\{1,2\}", r"\{3-2,2\}"), ("x=5", "x=2+3"), ("5 m", "5 cm"), (r"5\text{ m}", r"5\text{ m}^2"),
    (r"60 \text{ mph}", r"60 \text{ km/h}"), (r"\$5", r"5 \text{ cents}"), ("5", "5x"), ("5m", "5"), ("2", r"\pm2"),
    (r"\pm2", "2"), (r"2\pi", "2"), (r"2\pi", "6.28"), ("(1,2)", "(2,1)"), ("[1,2)", "(1,2]"), ("[1,2]", "(1,2)"),
    (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,2\}", "1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\text{Monday}", r"\text{Tuesday}"), ("Monday", "Modnay"), ("evil", "vile"), ("A", "B"),
    (r"\text{(A)}", r"\text{(B)}"), ("x^2", "2x"), ("x", "y"), ("x>3", "x<3"), ("x>3", r"x\ge 3"), ("x^2=-1", "1=2"),
    (r"\frac{1}{e}", "e"), ("1+2i", "1-2i"), ("z=2-3i", "z=2+3i"), ("a+bi", "a+b"), (r"e^{i\pi/3}", r"e^{-i\pi/3}"),
    ("-1", "i^2"), (r"1\text{ hour }30\text{ minutes}", r"1\text{ hr }20\text{ min}"), ("5", r"\frac10"),
    (r"\infty", r"-\infty"), ("5", r"\infty"), (r"\frac{1}{2}", "1, 2"), ("12", "1,2"), ("5", r"5 \text{ or } 6"),
    ("5", "5,6"), ("5", "42; 5"),
    # names: case, primes, indices
    ("R-r", "0"), ("2x+1", r"\hat p=3=2x+1"), (r"\frac{M}{m+M}", r"\frac12"), (r"\pi R^2", r"\pi r^2"),
    ("X_1", "x_1"), ("E", "e"), ("e", "E"), ("V/I", "V/i"), ("2I", "2i"), (r"\Delta", r"\delta"),
    (r"\Gamma", r"\gamma"), (r"\gamma", "0.5772"), (r"\Pi", r"\pi"), ("AB", "ab"), (r"\text{AB}", "ab"),
    ("AB", r"\text{ab}"), ("x=5", "X=5"), (r"\{R, 1\}", r"\{r, 1\}"), ("R>r", "r>R"), (r"\sin X", r"\sin x"),
    ("N!", "n!"), ("F(x)+1", "f(x)+1"), ("f'(x)", "f(x)"), ("f''(x)+1", "1+f'(x)"), ("A'B'", "AB"),
    ("y''+y=0", "y+y'=0"), (r"\theta'", r"\theta"), ("f^{-1}(x)", r"\frac{1}{f(x)}"), ("f^{(3)}(x)", "f(x)^3"),
    # spellings
    ("x<1 or x>3", "x<1, x<3"), ("€5", "5$"), ("€5", "$5"), ("5 m", "5$"), ("5 dollars", r"5\text{€}"),
    ("€5", r"\pounds5"),
    # words beside the answer that make it another
    ("circle", "circle square"), ("circle", "triangle circle"), ("apple", "apple tree"), (r"\text{Tom}", "Tom brother"),
    (r"\text{Anna}", "sister Anna"), ("red", "red blue green ball"), ("red", "red not a ball"),
    ("red", "not a ball red"), ("red", "red ball cube"), ("even", "even not odd function"),
    ("odd", "even function odd"), (r"\text{no}", "no solution"), (r"\text{right triangle}", "right triangle square"),
    *[("5", rf"5\text{{ {words}}}") for words in (
        "dozen pair balls", "twenty-one balls", "anything balls", "not balls", "half balls", "slices of not pizza",
        "slices of two pizzas")],
    # conditions that exclude what has a value
    (r"\sqrt{x}", r"\sqrt{x}, x\ge 1"), (r"\sqrt{x}", r"\sqrt{x}, x>0"), (r"\ln x", r"\ln x, x>1"),
    (r"\sqrt{x-100}", r"\sqrt{x-100}, x\ge 100.5"), (r"\sqrt{4-x}", r"\sqrt{4-x}, x<4"),
    (r"\sqrt{4-x}", r"\sqrt{4-x}, x\le 3.9"), (r"\ln(x^2-100)", r"\ln(x^2-100), x>10"),
]  # fmt: skip
SPELLINGS = [
    ("x+1", r"x+\!1"), ("1000", r"1\!000"), ("(1,2)", r"(1,\!2)"), ("e^2", r"\mathrm e^2"),
    ("2+3i", r"2+3\mathrm i"), ("x<5", r"x\lt 5"), ("x>5", r"x\gt 5"), ("x<1 or x>3", r"x\lt1\text{ or }x\gt3"),
    ("c>b>a", r"a\lt b\lt c"), (r"\{1,2\}", r"\lbrace 2,1\rbrace"),
    (r"\mathbb{R}", r"\mathbb R"),
    (r"\frac16", r"0.1\bar{6}"), (r"\frac16", r"0.1\dot6"),
    (r"\frac{4}{33}", r"0.\bar{12}"), (r"0.\overline{12}", r"0.\bar{12}"),
    ("£5", r"\pounds 5"), ("5 pounds", r"5\textsterling"), ("5 dollars", "5$"), ("5 dollars", "$5"),
    ("5", r"\text{5}"),
    ("80", r"\mbox{80}"), ("5", r"\mbox{5}"), ("-3", r"\mbox{-3}"),
    ("1/2", r"\mbox{1/2}"), ("3", r"x=\mbox{3}"),
]  # fmt: skip
"""Spellings that math-verify 0.9 alone reads as something else: each pair is equal by one rule of ours."""
SAME_SIGNS = {
    "×": r"\times", "⋅": r"\cdot", "÷": "/", "±": r"\pm", "≤": r"\le", "⩽": r"\le", "≦": r"\le",
    "⩾": r"\ge", "≧": r"\ge", "≡": r"\equiv", "∪": r"\cup", "∩": r"\cap", "∈": r"\in", "∖": r"\setminus", "→": r"\to",
    "∧": r"\land", "∨": r"\lor", "∠": r"\angle", "△": r"\triangle", "∗": "*", "，": ",", "′": "'", "’": "'",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
}  # fmt: skip
ITSELF = [(gold, gold) for gold in sorted({gold for gold, _ in RIGHT + WRONG + SPELLINGS})]


@pytest.mark.parametrize(
    ("pairs", "worth"),
    [(RIGHT, 1.0), (SPELLINGS, 1.0), (WRONG, 0.0), (ITSELF, 1.0)],
    ids=["equal", "spelling", "other", "itself"],
)
def test_answers_are_judged_as_a_careful_person_would(
    reward: MathReward, pairs: list[tuple[str, str]], worth: float
) -> None:
    scores = reward([f"so \\boxed{{{answer}}}" for _, answer in pairs], [gold for gold, _ in pairs], {})
    assert [(*pair, score) for pair, score in zip(pairs, scores, strict=True) if score.value != worth] == []


@pytest.mark.parametrize(("gold", "attempts"), [("100000000!", 1), ("(x+y+z+w)^{99}", 2)])
def test_a_gold_answer_that_is_a_bomb_costs_little_however_many_answers_there_are(gold: str, attempts: int) -> None:
    """It does not hear the soft limit, so that each attempt costs a worker: with itself, before that with one answer
    where it does not look costly."""
    reward = MathReward(soft_limit_s=0.3, hard_limit_s=0.5)
    texts = [f"\\boxed{{{i}+x}}" for i in range(12)]
    for attempt in range(2):
        scores = reward([*texts, "no box"], [gold] * 13, {})
        assert {(score.value, score.status) for score in scores[:12]} == {(None, "bad_gold")}, attempt
    assert reward.pool.kills <= attempts
    reward.close()


def test_a_bad_gold_answer_may_be_forgotten_while_others_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its age, or by another thread that remembers too many."""
    reward = MathReward(workers=1)
    run = reward.pool.run

    def forget(jobs: Sequence[tuple[str, str]]) -> list[Verdict]:
        reward._costly_golds.clear()
        return run(jobs)

    monkeypatch.setattr(reward.pool, "run", forget)
    reward._costly_golds["x!"] = math.inf
    texts = [r"\boxed{x+y}", r"\boxed{1+x}"]
    assert [score.status for score in reward(texts, ["x!", "x+1"], {})] == ["bad_gold", "ok"]
    reward.close()


def test_unevaluated_work_is_an_option(reward: MathReward) -> None:
    lax = replace(reward, allow_unevaluated=True)
    pairs = [("56088", r"123\cdot456"), ("12", "84/7"), ("56088", r"123\cdot457")]
    assert [judge(lax, *pair) for pair in pairs] == [1.0, 1.0, 0.0]


def test_percent_can_be_read_as_a_unit(reward: MathReward) -> None:
    unit = replace(reward, percent="unit")
    pairs = [("50", r"50\%"), ("0.5", r"50\%"), (r"x=50\%", "50")]
    assert [judge(unit, *pair) for pair in pairs] == [1.0, 0.0, 1.0]


def test_a_missing_cut_off_or_empty_box_is_no_answer(reward: MathReward) -> None:
    for completion in ["5", r"\boxed{5", r"\boxed{}", r"\boxed{ }", r"\boxed{5}\boxed{}", r"\boxed{5} or \boxed{5", ""]:
        score = reward([completion], ["5"], {})[0]
        assert (score.value, score.status) == (0.0, "no_answer"), completion


@pytest.mark.parametrize(
    "options",
    [
        {"soft_limit_s": 0.0}, {"soft_limit_s": float("nan")}, {"soft_limit_s": 2.0, "hard_limit_s": 2.0},
        {"hard_limit_s": float("inf")}, {"workers": 0}, {"memory_limit_mb": 10}, {"max_answer_chars": 0},
        {"relative_tolerance": 1.5}, {"percent": "no"},
    ],
)  # fmt: skip
def test_senseless_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        MathReward(**options)


def test_exact_reward_compares_strings() -> None:
    reward = ExactReward()
    completions = [r"\boxed{0.5}", r"\boxed{ 1/2 }", "1/2", r"\boxed{}"]
    scores = reward(completions, ["1/2"] * 4, {})
    assert [(s.value, s.status) for s in scores] == [(0, "wrong"), (1, "ok"), (0, "no_answer"), (0, "no_answer")]
    assert reward([r"\boxed{5}"], [" "], {})[0].status == "bad_gold"


@pytest.mark.parametrize("gold", ["", "}}", "nan", r"\frac{1}{0}", "7 + ^^"])
@pytest.mark.parametrize("completion", ["", "no box", r"\boxed{}", r"\boxed{5", rf"\boxed{{{'7' * 500}}}"])
def test_a_gold_answer_that_cannot_be_read_is_blamed_whatever_the_completion_is(
    reward: MathReward, gold: str, completion: str
) -> None:
    assert reward.gold_faults([gold]) != [""]
    (score,) = reward([completion], [gold], {})
    assert (score.value, score.status) == (None, "bad_gold")


def test_rewards_with_equal_limits_share_their_workers() -> None:
    one, two, other = MathReward(), MathReward(name="again"), MathReward(memory_limit_mb=1024)
    assert one.pool is two.pool
    assert one.pool is not other.pool


@pytest.mark.parametrize("sign", SAME_SIGNS)
def test_a_sign_of_unicode_is_one_of_latex(sign: str) -> None:
    assert canonical(f"a {sign} b") == canonical(f"a {SAME_SIGNS[sign]} b")


LISTS = [
    ("1, 2", "2, 1"), (r"\sqrt2, 3", r"3, \sqrt2"), ("red, blue", "blue, red"), ("1, 2", "1,2"), (r"\{1,2\}", "2, 1"),
]  # fmt: skip


def values(reward: MathReward, columns: dict) -> list[float | None]:
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in LISTS], [gold for gold, _ in LISTS], columns)
    return [score.value for score in scores]


def test_lists_are_ordered_by_the_option_or_by_a_column_for_each_problem(reward: MathReward) -> None:
    ordered = replace(reward, ordered=True)
    assert values(reward, {}) == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert values(ordered, {}) == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert values(reward, {"ordered": [True, False, 1, 0, None]}) == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert values(ordered, {"ordered": [False, None, True, True, True]}) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert values(reward, {"ordered": ["true", "false", "True", "FALSE", ""]}) == [0.0, 1.0, 0.0, 1.0, 1.0]  # of CSV
    assert values(ordered, {"ordered": ["", "false", " ", "false", "true"]}) == [0.0, 1.0, 0.0, 1.0, 1.0]
    with pytest.raises(MissingColumn, match="'ordered' must hold true or false, got 'no'"):
        values(reward, {"ordered": ["no"] * 5})
