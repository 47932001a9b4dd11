"""A small policy for the texts of a task: tokens for constant parts, context and lengths, width and layers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, product

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.template import ANSWER_TAGS, THINK_TAGS
from grpo_pl.policy.tokenizer import CHARACTERS
from grpo_pl.types import Problem

_WORD = re.compile(r"[A-Za-z]+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
"""No constant part holds a number: it is always spelled alike, and what it says is seen."""
_SIGN = re.compile(r"[-+]$")
_LETTERS = re.compile(r"[^\W\d_]{2}")
SHORTEST = 8
"""Characters of a constant part that is worth a token of its own."""
COMMON = 0.2
"""Share of the texts that a constant part occurs in."""
MOST = 24
"""Constant parts at most."""
LOOKED_AT = 64
"""Texts that constant parts are looked for in."""
SAMPLED = 256
"""Problems that lengths are measured on."""
SPELLED = 1024
"""Problems whose characters are looked at: prose has a rare one every few hundred texts."""
FEWEST = 32
"""Problems of a step of the cold start and of a rollout."""
WORK = 35e6
"""Most parameters times tokens of a row: enough steps and rollouts then fit into a few minutes of two cores."""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The settings that follow from the texts of a task."""

    tags: Sequence[str]
    """Texts that are one token each."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Most tokens of a completion."""
    row: int
    """Tokens of a prompt and its completion, in the mean, of the longer half of the demonstrations: with their work."""
    written: int
    """Tokens of a completion in the mean."""
    shown: Sequence[Demonstration]
    ascii_only: bool
    """The characters of every from-scratch vocabulary are enough."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and its completion, with room for prompts somewhat longer than those looked at."""
        return -(-(self.prompt * 5 // 4 + self.completion) // 32) * 32


def measure_texts(source: PromptSource) -> TextSettings:
    """Measures the first problems of a source and its demonstrations."""
    problems = _first(source)
    made = [source.demonstration(each, random.Random(row_key("new", each.id, n))) for each in problems for n in (0, 1)]
    known = [text for text in made if text is not None]
    if len(known) < len(made):
        raise ValueError(
            "the task has problems without an answer, so no demonstrations for a cold start to learn from."
        )
    questions = [problem.question for problem in problems]
    shown = [Demonstration(questions[number // 2], text) for number, text in enumerate(known)]
    frame = [tag for tag in (*THINK_TAGS, *ANSWER_TAGS) if any(tag in text for text in known)]
    tags = [*constant_parts(questions, [problem.answer for problem in problems]), *frame]
    length = token_counter(tags)
    lengths = sorted(length(text) + 1 for text in known)  # and EOS
    longer = lengths[len(lengths) // 2 :]
    prompts = [length(question) for question in questions]
    return TextSettings(
        tags=tags,
        prompt=max(prompts),
        completion=-(-lengths[-1] * 5 // 4 // 8) * 8,
        written=round(sum(lengths) / len(lengths)),
        shown=shown,
        row=round(sum(prompts) / len(prompts) + sum(longer) / len(longer)),
        ascii_only=not set("".join([*questions, *known, *_further_texts(source)])) - set(CHARACTERS),
    )


def _first(source: PromptSource) -> Sequence[Problem]:
    """Some training problems: as many as there are, up to ``SAMPLED``."""
    rows = source.problems("train")
    if rows is not None:
        return rows[:SAMPLED]
    for count in (SAMPLED, 64):
        with suppress(ValueError):
            return source.prompts(0, count=count)
    return source.prompts(0, count=FEWEST)


def _further_texts(source: PromptSource) -> Iterator[str]:
    """Questions, answers and demonstrations of more training problems: of all of a file's, of the first ``SPELLED``
    made up."""
    rows: Iterable[Problem] | None = source.problems("train")
    if rows is None:
        steps = range(1, 1 + SPELLED // FEWEST)
        rows = chain.from_iterable(source.prompts(step, count=FEWEST) for step in steps)
    for problem in rows:
        shown = source.demonstration(problem, random.Random(row_key("new", problem.id, 0)))
        yield from (problem.question, problem.answer, shown or "")


def constant_parts(texts: Sequence[str], answers: Sequence[str] = ()) -> list[str]:
    """Runs of whole words and marks that many texts share, those first that save most.

    Instructions that every question repeats cost a from-scratch policy a token a character; as a token each, what is
    left of a prompt is what differs. Repeats until nothing of ``SHORTEST`` characters is common. No run holds a number
    or a word of an answer, which the policy has to read and to copy character by character.
    """
    known = dict(zip(texts, [*answers, *[""] * len(texts)], strict=False))
    texts = list(known)[:LOOKED_AT]
    words = {word for answer in list(known.values())[:LOOKED_AT] for word in re.findall(r"[^\W\d_]+", answer)}
    apart = re.compile("|".join([_NUMBER.pattern, *(rf"\b{re.escape(word)}\b" for word in sorted(words))]))
    pieces = [[piece for piece in apart.split(text) if piece] for text in texts]
    least = max(2, round(COMMON * len(texts)))
    found: list[str] = []
    while len(found) < MOST and (part := _best(pieces, least)):
        found.append(part)
        pieces = [[rest for piece in text for rest in piece.split(part) if rest] for text in pieces]
    return found


def _best(pieces: Sequence[Sequence[str]], least: int) -> str:
    """The run that saves most characters, of those in ``least`` texts; empty where there is none.

    From every word the longest runs are looked at that ``least``, half and all of the texts have.
    """

    def count(run: str) -> int:
        return sum(any(run in piece for piece in text) for text in pieces)

    best, saved = "", 0
    looked = [piece for text in pieces[:8] for piece in text if len(piece) >= SHORTEST]
    for piece, shared in product(dict.fromkeys(looked), sorted({least, len(pieces) // 2, len(pieces)})):
        words = _WORD.findall(piece)
        end = 0
        for first in range(len(words)):
            if end > first and (end == len(words) or count("".join(words[first : end + 1])) < shared):
                continue  # the run from here is the end of the one before
            low, high = first, len(words)  # the longest run from here, by bisection: longer ones are rarer
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if count("".join(words[first:middle])) >= shared else (low, middle - 1)
            end = low
            run = _SIGN.sub("", "".join(words[first:end]))
            gain = (len(run) - 1) * count(run) if len(run) >= SHORTEST and _LETTERS.search(run) else 0
            if gain > saved:
                best, saved = run, gain
    return best


def token_counter(tags: Sequence[str]) -> Callable[[str], int]:
    """Tokens of a text under a vocabulary of characters and ``tags``, of which longer ones go first."""
    pattern = re.compile("|".join([*map(re.escape, sorted(tags, key=len, reverse=True)), "."]), re.DOTALL)
    return lambda text: len(pattern.findall(text))


@dataclass(frozen=True)
class Shape:
    """Width and layers of a policy: narrower for longer rows, so that all take about the same time."""

    hidden: int
    layers: int

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward blocks, 2.75 times that of the rest."""
        return self.hidden * 11 // 4

    def work(self, tokens: int) -> int:
        """Parameters of the blocks times tokens of a row."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.intermediate) * tokens


SHAPES = (Shape(128, 3), Shape(112, 3), Shape(96, 3), Shape(80, 3), Shape(64, 3), Shape(64, 2))


def shape_for(tokens: int) -> Shape:
    """The widest policy that trains on rows of so many tokens within the budget; else the smallest."""
    return next((shape for shape in SHAPES if shape.work(tokens) <= WORK), SHAPES[-1])
