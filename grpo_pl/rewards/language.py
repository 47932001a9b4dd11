"""``LanguageConsistencyReward``: the share of a completion's words that are in the target language's script."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.rewards.base import PerCompletionReward, Score

Language = Literal["en", "de", "fr", "es", "zh", "ja", "ko", "ru", "ar", "el", "he", "hi", "th"]
_SCRIPTS = {
    **dict.fromkeys(("en", "de", "fr", "es"), "LATIN"),
    "zh": "CJK", "ja": "CJK HIRAGANA KATAKANA KATAKANA-HIRAGANA", "ko": "HANGUL", "ru": "CYRILLIC", "ar": "ARABIC",
    "el": "GREEK", "he": "HEBREW", "hi": "DEVANAGARI", "th": "THAI",
}  # fmt: skip
_UNSPACED = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "THAI"})
_CLOSING = {"```": "```", "$$": "$$", "\\[": "\\]", "\\(": "\\)"}
"""Opening delimiter of code or a formula -> its closing delimiter."""
_NOT_PROSE = re.compile(
    r"(?P<opening>```|\$\$|\\[\[(])"
    r"|\$[^$\n]*\$"  # formulas
    r"|\\boxed\s*\{[^{}]*\}|\\[a-zA-Z]+"  # answers and stray commands
    r"|</?[a-zA-Z_]+>"  # tags
)
_WORD = re.compile(r"[^\W\d_](?:[\w'’\-]*\w)?")


@lru_cache(maxsize=4096)
def script_of(char: str) -> str:
    """First word of the Unicode name of a letter: ``LATIN``, ``CJK``, ``CYRILLIC`` …; empty for anything else.

    Letters in another width or style, such as ``Ａ`` and ``𝐀``, count as their NFKC form.
    """
    if not char.isalpha():
        return ""
    first = unicodedata.name(unicodedata.normalize("NFKC", char)[0], "").split(" ")[0]
    return "CJK" if first == "IDEOGRAPHIC" else first  # 々


def prose(text: str) -> str:
    """``text`` without code, formulas, boxes, LaTeX commands and tags, in linear time.

    Unclosed code extends to the end of the text; of an unclosed formula only the opening delimiter is removed.
    """
    kept: list[str] = []
    position, unclosed = 0, set[str]()
    while match := _NOT_PROSE.search(text, position):
        kept.append(text[position : match.start()])
        position, opening = match.end(), match["opening"]
        if opening is None or opening in unclosed:
            continue
        closing = _CLOSING[opening]
        end = text.find(closing, position)
        if end >= 0:
            position = end + len(closing)
        elif opening == "```":
            return " ".join(kept)
        else:
            unclosed.add(opening)  # later ones are unclosed, too; searching for each would take quadratic time
    return " ".join([*kept, text[position:]])


def words_by_script(text: str) -> list[str]:
    """The script of every word of prose in ``text``; in scripts without spaces each character counts as a word.

    Code, formulas, boxes, LaTeX commands, tags, numbers, and single Latin or Greek letters (variables) are left out.
    A word whose letters are of several scripts, such as ``aПривет``, is ``MIXED``.
    """
    scripts = []
    for match in _WORD.finditer(prose(text)):
        pieces = [script_of(char) for char in match.group() if char.isalpha()]
        scripts += [script for script in pieces if script in _UNSPACED]
        spaced = [script for script in pieces if script not in _UNSPACED and script != "MODIFIER"]  # as the ʼ of donʼt
        if len(spaced) > 1 or (spaced and spaced[0] not in ("LATIN", "GREEK")):
            scripts.append(spaced[0] if len(set(spaced)) == 1 else "MIXED")
    return scripts


@dataclass(kw_only=True)
class LanguageConsistencyReward(PerCompletionReward):
    """Share of the words of a completion that are in the target language's script; range [0, 1].

    The second stage of DeepSeek-R1's training rewards the proportion of target-language words in the chain of thought
    (arXiv 2501.12948, section 2.3.2), against answers that mix languages. Words are told apart by script, not by
    vocabulary: this detects English mixed with Chinese, but cannot tell German from English. A word with letters of
    several scripts counts for no language. A completion without any word of prose is ``no_answer`` and worth 0, so that
    writing nothing is not rewarded.
    """

    trusted = True
    name: str = "language"
    language: Language = "en"
    """Target language, by its ISO 639-1 code."""

    def __post_init__(self) -> None:
        check_choice("language", self.language, Language)

    def score(self, completion: str, gold: str) -> Score:
        scripts = words_by_script(completion)
        if not scripts:
            return Score(0.0, "no_answer", "no words")
        wanted = _SCRIPTS[self.language].split()
        hits = sum(script in wanted for script in scripts)
        return Score.of(hits / len(scripts), f"{hits} of {len(scripts)} words")
