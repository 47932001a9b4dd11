"""Spellings that math-verify 0.9 alone reads as something else: each pair is equal by one rule of ours."""

import pytest

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.mathematics.canonical import canonical

EQUAL = [
    ("x+1", r"x+\!1"), ("1000", r"1\!000"), ("(1,2)", r"(1,\!2)"), ("e^2", r"\mathrm e^2"),
    ("2+3i", r"2+3\mathrm i"), ("x<5", r"x\lt 5"), ("x>5", r"x\gt 5"), ("x<1 or x>3", r"x\lt1\text{ or }x\gt3"),
    ("c>b>a", r"a\lt b\lt c"), (r"\{1,2\}", r"\lbrace 2,1\rbrace"), (r"\mathbb{R}", r"\R"),
    (r"\mathbb{R}", r"\mathbb R"), (r"\mathbb{R}", r"\Reals"), (r"\mathbb{R}\setminus\{2\}", r"\R\backslash\{2\}"),
    (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\smallsetminus\{2\}"),
    (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}-\{2\}"), (r"\frac16", r"0.1\bar{6}"), (r"\frac16", r"0.1\dot6"),
    (r"\frac{4}{33}", r"0.\bar{12}"), (r"0.\overline{12}", r"0.\bar{12}"), (r"\sqrt2", r"\sqrt2\simeq1.41"),
    (r"\sqrt2", r"\sqrt2\doteq1.41"), (r"\sqrt2", r"\sqrt2\thickapprox1.41"), (r"2\pi", "2pi"),
    ("5 euro", r"5\text{€}"), ("£5", r"5\text{ £ }"), ("5 euro", r"5\texteuro{}"), ("€5", r"\euro 5"),
    ("£5", r"\pounds 5"), ("5 pounds", r"5\textsterling"), ("5 dollars", "5$"), ("5 dollars", "$5"),
    ("5", r"\text{5}"), ("x<1 or x>3", "x<1, x>3"), ("x>1, x<3", "x>1 and x<3"),
    (r"x \le 2 or y > 3", r"x \le 2, y>3"), ("80", r"\mbox{80}"), ("5", r"\mbox{5}"), ("-3", r"\mbox{-3}"),
    ("1/2", r"\mbox{1/2}"), ("3", r"x=\mbox{3}"), ("80", r"\ce{80}"), ("1000", r"\text{1{,}000}"), ("5", r"\text{$5}"),
    ("5", r"\text{{5}}"), ("-4", r"\text{\textbf{-4}}"), ("e^2", r"\mathrme^2"), ("2+3i", r"2+3\mathrmi"),
]  # fmt: skip
SAME_SIGNS = {
    "×": r"\times", "⋅": r"\cdot", "÷": "/", "±": r"\pm", "≤": r"\le", "⩽": r"\le", "≦": r"\le",
    "⩾": r"\ge", "≧": r"\ge", "≡": r"\equiv", "∪": r"\cup", "∩": r"\cap", "∈": r"\in", "∖": r"\setminus", "→": r"\to",
    "∧": r"\land", "∨": r"\lor", "∠": r"\angle", "△": r"\triangle", "∗": "*", "，": ",", "′": "'", "’": "'",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "α": r"\alpha", "β": r"\beta", "λ": r"\lambda", "ω": r"\omega", "Γ": r"\Gamma", "Δ": r"\Delta", "Ψ": r"\Psi",
}  # fmt: skip
DIFFERENT = [
    ("x<1 or x>3", "x<1, x<3"),
    ("€5", "5$"),
    ("€5", "$5"),
    ("5 m", "5$"),
    ("5 dollars", r"5\text{€}"),
    ("€5", r"\pounds5"),
]


def test_a_spelling_does_not_count() -> None:
    reward = MathReward(workers=1, soft_limit_s=5.0, hard_limit_s=20.0)
    pairs = [*EQUAL, *DIFFERENT]
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in pairs], [gold for gold, _ in pairs], {})
    reward.close()
    assert [pair for pair, score in zip(pairs, scores, strict=True) if score.value == 1.0] == EQUAL


@pytest.mark.parametrize("sign", SAME_SIGNS)
def test_a_sign_of_unicode_is_one_of_latex(sign: str) -> None:
    assert canonical(f"a {sign} b") == canonical(f"a {SAME_SIGNS[sign]} b")
