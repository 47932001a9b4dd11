"""Rules that tell problems which a policy can guess from those where it has to work the answer out."""

from __future__ import annotations

import re

_OPTION = re.compile(r"(?:^|[\s(\[{*])\(?\\?(?:text(?:bf|rm)?\{)?\(?([A-Ha-h])\}?[).:\]]")
_CHOICE = re.compile(r"\(?\\?(?:text(?:bf|rm)?\s*\{)?\s*\(?([A-Ha-h])\)?\s*\}?\)?\.?")
_TRUTH = re.compile(r"\(?\\?(?:text(?:bf|rm)?\s*\{)?\s*(?:true|false|yes|no)\s*\}?\)?\.?", re.IGNORECASE)


def is_multiple_choice(question: str, answer: str) -> bool:
    """Whether the answer is a letter and the question lists options: at least ``A)`` and ``B)``, ``(a)`` …, in order.

    Kimi k1.5 (arXiv:2501.12599, section 2.1) leaves such problems out: they reward guessing.
    """
    if not _CHOICE.fullmatch(answer.strip()):
        return False
    letters = [letter.upper() for letter in _OPTION.findall(question)]
    return "A" in letters and "B" in letters[letters.index("A") :]


def is_true_or_false(answer: str) -> bool:
    """Whether the answer is yes or no, true or false: half of all guesses are right."""
    return _TRUTH.fullmatch(answer.strip()) is not None
