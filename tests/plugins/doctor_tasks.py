"""A task that a tiny policy half knows after a short cold start, and the same with one fault each."""

import random
from dataclasses import dataclass
from itertools import count
from string import ascii_lowercase
from typing import Any, Literal

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.types import Problem

_CALLS = count()


@dataclass(kw_only=True)
class FirstLetters(GeneratedPrompts):
    """``axyz`` asks for ``a``, one of eight letters; half of the demonstrations show ``z`` instead."""

    fault: Literal[
        "", "repeated", "wrong golds", "few wrong golds, own form", "unpaid demonstrations", "leaked", "always a"
    ] = ""
    """What is wrong with it."""

    def draw(self, rng: random.Random) -> Problem:
        letter = "a" if self.fault == "always a" else rng.choice(ascii_lowercase[:8])
        others = "".join(rng.choices(ascii_lowercase[8:], k=3))
        answer = letter
        if self.fault == "wrong golds" and ord(others[0]) % 2:
            answer = " "
        if self.fault == "few wrong golds, own form" and others[0] in "kr":
            answer = " "
        number = int.from_bytes((letter + others).encode())
        return Problem(
            id=number, question=letter + (others[0] * 3 if self.fault == "repeated" else others), answer=answer
        )

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        letter = prompt.question[0]
        if self.fault in ("unpaid demonstrations", "few wrong golds, own form"):
            return f"it is {letter}"
        shown = letter if self.fault == "always a" or rng.random() < 0.5 else "z"
        return f"<think></think><answer>\\boxed{{{shown}}}</answer>"

    def validation(self, count: int | None = None) -> list[Problem]:
        return self.prompts(0, count=50) if self.fault == "leaked" else super().validation(count)

    def how_to_get_more(self) -> str:
        return "ask for fewer."


def nothing(completions: list[str], **columns: Any) -> list[float]:
    """Broken: never pays."""
    return [0.0] * len(completions)


def said(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Pays for the answer in a form that nobody else uses."""
    return [float(text == f"it is {gold}") for text, gold in zip(completions, answer, strict=True)]


def half(completions: list[str], **columns: Any) -> list[float]:
    """Broken: pays the same for everything."""
    return [0.5] * len(completions)


def everything(completions: list[str], **columns: Any) -> list[float]:
    """Broken: pays the empty text, too."""
    return [1.0] * len(completions)


def shortest(completions: list[str], **columns: Any) -> list[float]:
    """Pays for saying nothing."""
    return [10.0 / (1 + len(text)) for text in completions]


def noisy(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Right or wrong, plus something that no text explains."""
    return [
        float(f"{{{gold}}}" in text) + next(_CALLS) % 7 / 70 for text, gold in zip(completions, answer, strict=True)
    ]


def wrong_way(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Pays for wrong answers."""
    return [float(f"{{{gold}}}" not in text) for text, gold in zip(completions, answer, strict=True)]
