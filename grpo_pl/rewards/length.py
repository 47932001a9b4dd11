"""``LengthReward`` and ``RepetitionReward``: rewards for the length of a completion, penalties for repetition."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score


def overlong_punishment(length: int, *, max_length: int, cache_length: int) -> float:
    """``−min(1, max(0, (length − (L − c)) / c))``: 0 up to L − c, then falling linearly, −1 from L on.

    L is ``max_length`` and c is ``cache_length``, both in tokens. DAPO (arXiv 2503.14476), equation 13.
    """
    return -min(1.0, max(0.0, (length - (max_length - cache_length)) / cache_length))


def cosine_scale(length: int, *, max_length: int, at_start: float, at_end: float) -> float:
    """``at_end + (at_start − at_end) · (1 + cos(π·p)) / 2`` with p = min(1, length / max_length).

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373).
    """
    progress = min(1.0, length / max_length)
    return at_end + (at_start - at_end) * (1.0 + math.cos(math.pi * progress)) / 2.0


def budget_share(length: int, *, budget: int) -> float:
    """``min(1, max(0, 2 − length / budget))``: 1 within the budget, then falling linearly to 0 at twice the budget."""
    return min(1.0, max(0.0, 2.0 - length / budget))


@dataclass(kw_only=True)
class LengthReward(Reward):
    """Rewards or punishes the number of completion tokens n, which the pipeline passes as ``completion_length``.

    - ``overlong`` (DAPO's soft punishment, `overlong_punishment`), range [−1, 0]: 0 up to ``max_length`` −
      ``cache_length``, −1 from ``max_length`` on, linear in between.
    - ``cosine`` (`cosine_scale`), range between the four ``*_short`` and ``*_long`` values: a right answer is worth
      ``right_short`` at n = 0 and ``right_long`` at ``max_length``, a wrong one ``wrong_short`` and ``wrong_long``,
      with half a cosine wave in between and constant beyond ``max_length``. The reward ``correct`` says which answers
      are right; where it has no value, this reward has none.
    - ``budget`` (`budget_share`), range [0, 1]: 1 up to the budget, 0 from twice the budget on, linear in between. The
      budget in tokens is the row's ``token_budget`` column, or ``max_length`` where there is none or it is empty.
    """

    trusted = True
    name: str = "length"
    shape: Literal["overlong", "cosine", "budget"] = "overlong"
    """The formula, see above."""
    max_length: int = 256
    """Length in tokens where the formula ends: the limit of the sampler, or the budget."""
    cache_length: int = 64
    """``overlong``: tokens before ``max_length`` over which the punishment grows."""
    right_short: float = 1.0
    """``cosine``: value of a right answer without any text."""
    right_long: float = 0.5
    """``cosine``: value of a right answer of ``max_length`` tokens."""
    wrong_short: float = -1.0
    """``cosine``: value of a wrong answer without any text."""
    wrong_long: float = -0.5
    """``cosine``: value of a wrong answer of ``max_length`` tokens."""
    correct: Reward | None = None
    """``cosine``: the reward that says whether an answer is right (full value 1), such as MathReward."""

    def __post_init__(self) -> None:
        if self.shape not in ("overlong", "cosine", "budget"):
            raise ValueError(f"shape must be 'overlong', 'cosine' or 'budget', got {self.shape!r}.")
        check_at_least(1, f"reward {self.name!r}", max_length=self.max_length)
        if self.shape == "overlong" and not 1 <= self.cache_length <= self.max_length:
            raise ValueError(f"cache_length must lie in [1, max_length={self.max_length}], got {self.cache_length}.")
        if (self.shape == "cosine") != (self.correct is not None):
            raise ValueError(
                f"shape {self.shape!r} and correct={self.correct!r}: 'cosine', and only it, needs `correct`."
            )

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"completion_length"}

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        if "completion_length" not in columns:
            raise MissingColumn(
                f"reward {self.name!r} needs the column 'completion_length' (tokens of each completion); "
                f"there are only {sorted(columns)}. Rows scored from a file must carry it."
            )
        lengths = [self._tokens("completion_length", n, fewest=0) for n in columns["completion_length"]]
        if self.correct is not None:
            scores = self.correct(completions, answers, columns)
            return [self._cosine(n, score) for n, score in zip(lengths, scores, strict=True)]
        if self.shape == "overlong":
            punish = partial(overlong_punishment, max_length=self.max_length, cache_length=self.cache_length)
            return [_score(punish(n), 0.0, f"{n} tokens") for n in lengths]
        given = columns.get("token_budget", [self.max_length] * len(lengths))
        filled = [self.max_length if n is None or str(n).isspace() or n == "" else n for n in given]
        budgets = [self._tokens("token_budget", n, fewest=1) for n in filled]
        pairs = zip(lengths, budgets, strict=True)
        return [_score(budget_share(n, budget=most), 1.0, f"{n} of {most} tokens") for n, most in pairs]

    def _tokens(self, column: str, value: Any, *, fewest: int) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            number = fewest - 1
        if not fewest <= number < 2**53:
            shown = repr(value)[:40]
            raise MissingColumn(f"reward {self.name!r}: {column} must be a whole number >= {fewest}, got {shown}.")
        return number

    def _cosine(self, length: int, correct: Score) -> Score:
        if correct.value is None:
            return Score(None, correct.status, correct.detail)
        right = correct.value >= 1.0
        start, end = (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        value = cosine_scale(length, max_length=self.max_length, at_start=start, at_end=end)
        return Score(value, "ok" if right else "wrong", f"{length} tokens")


def _score(value: float, best: float, detail: str) -> Score:
    return Score(value, "ok" if value == best else "wrong", detail)


@dataclass(kw_only=True)
class RepetitionReward(Reward):
    """``−max_penalty · s`` with the repeated share s of a completion, `repeated_share`; range [−``max_penalty``, 0].

    s is the largest of three shares. (1) 1 − distinct n-grams / n-grams of words, which are split at white space and
    compared in lower case. (2) The same for runs of max(16, 4n) characters without white space, because repetition
    without spaces (``42,42,42…``) is a single word. (3) The share of characters that belong to the third or a later
    copy in a row, because texts can be shorter than an n-gram (``42|42|42``). Yeo et al. (arXiv 2502.03373) use an
    n-gram penalty against length hacking.
    """

    trusted = True
    name: str = "repetition"
    ngram: int = 4
    """n: words per n-gram."""
    max_penalty: float = 1.0
    """Upper bound of the penalty, approached by a long text that repeats one n-gram."""
    unit: Literal["word", "character"] = "word"
    """Unit of n-grams; ``character`` is for scripts that do not put spaces between words."""

    def __post_init__(self) -> None:
        check_at_least(1, f"reward {self.name!r}", ngram=self.ngram)
        if not 0.0 <= self.max_penalty < math.inf:
            raise ValueError(f"max_penalty must be finite and not negative, got {self.max_penalty}.")
        if self.unit not in ("word", "character"):
            raise ValueError(f"unit must be 'word' or 'character', got {self.unit!r}.")

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        shares = [repeated_share(completion, n=self.ngram, unit=self.unit) for completion in completions]
        return [Score(0.0 - self.max_penalty * s, "ok" if s == 0 else "wrong", f"{s:.0%} repeated") for s in shares]


_FEWEST_CHARACTERS = 16
"""Smallest n of n-grams of characters beside words: shorter ones recur in ordinary text."""
_FEWEST_COLUMNS = 8
"""Smallest width in columns of a counted stretch: shorter ones are ordinary, as ``(0,0,0)``, ``1+1+1``, ``haha``."""


def repeated_share(text: str, *, n: int, unit: Literal["word", "character"] = "word") -> float:
    """1 − (distinct n-grams) / (n-grams) of ``text``, or a larger share below; in [0, 1).

    ``unit`` says what n-grams are made of: lower-case words, or characters without white space. With words, the share
    of runs of max(16, 4n) characters counts if it is larger; with either unit, the share of characters in the third or
    a later copy in a row counts if it is larger. A text with fewer than n units has n-gram share 0.
    """
    words = text.lower().split()
    characters = "".join(words)
    longest = max(_FEWEST_CHARACTERS, 4 * n)
    in_a_row = _third_in_a_row(" ".join(words), longest)
    if unit == "character":
        return max(_repeated(characters, n), in_a_row)
    return max(_repeated(words, n), _repeated(characters, longest), in_a_row)


def _third_in_a_row(text: str, longest: int) -> float:
    """The share of characters of ``text`` in the third or a later copy in a row of a piece of up to ``longest`` ones.

    The third copy may lack up to two separators at its end (``42|42|42``). Stretches narrower than ``_FEWEST_COLUMNS``
    columns do not count, nor do repeated zeros.
    """
    counted = position = floor = 0
    repeated = re.compile(rf"(?=(.{{1,{longest}}}?)\1)", re.DOTALL)
    while twice := repeated.search(text, position):
        start, end, length = twice.start(), twice.end(1) + len(twice[1]), len(twice[1])
        while start > floor and text[start - 1] == text[start - 1 + length]:
            start -= 1
        while end < len(text) and text[end] == text[end - length]:
            end += 1
        missing = text[end - length : start + 2 * length]  # of the third copy
        columns = end - start + sum(unicodedata.east_asian_width(char) in "WF" for char in text[start:end])
        if columns < _FEWEST_COLUMNS or not re.fullmatch(r"\W{0,2}", missing):
            position = twice.start() + 1
        else:
            counted += max(0, end - start - 2 * length) if twice[1].strip("0,. ") else 0
            position = floor = end
    return counted / max(1, len(text))


def _repeated(units: Sequence[str], n: int) -> float:
    total = len(units) - n + 1
    runs = (units[i : i + n] for i in range(total))
    distinct = set(runs if isinstance(units, str) else map(tuple, runs))
    return 1.0 - len(distinct) / total if total > 0 else 0.0
