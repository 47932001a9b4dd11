"""Which problems can be guessed."""

import pytest

from grpo_pl.data.cells import is_multiple_choice, is_true_or_false


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        ("Pick one: A) 3 B) 4 C) 5", "B", True),
        ("Pick one.\n(a) red\n(b) blue", "(b)", True),
        (r"Choose: $\textbf{(A)}\ 1 \qquad\textbf{(B)}\ 2$", r"\text{A}", True),
        ("A. yes\nB. no", "A.", True),
        ("Which letter comes after C?", "D", False),
        ("Pick one: A) 3 B) 4", "3", False),
        ("Point A) lies on the line.", "A", False),
        ("What is 1+1?", "2", False),
    ],
)
def test_multiple_choice(question: str, answer: str, expected: bool) -> None:
    assert is_multiple_choice(question, answer) is expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("True", True), (r"\text{no}", True), ("yes.", True), ("north", False)]
)
def test_true_or_false(answer: str, expected: bool) -> None:
    assert is_true_or_false(answer) is expected
