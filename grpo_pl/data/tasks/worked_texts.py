"""Work on words, letters and lists, written out for demonstrations of reasoning-gym's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal


def shown(state: str | Sequence[object]) -> str:
    """A state of a machine: a text as it is, a list with spaces between."""
    return state if isinstance(state, str) else " ".join(map(str, state))


def numbered(word: str) -> str:
    """Every letter with its place: ``sun`` to ``s1u2n3``."""
    return "".join(f"{letter}{place}" for place, letter in enumerate(word, 1))


def counted(text: str, letter: str) -> str:
    """The text with a count behind every such letter: ``noon`` and ``o`` to ``no1o2n``."""
    count, copied = 0, ""
    for each in text:
        copied += each
        if each.lower() == letter.lower():
            count += 1
            copied += str(count)
    return copied


def inserted(items: Sequence[str], goal: Sequence[str]) -> list[str]:
    """The list sorted so far, a line for every item: 3, 1, 2 to ``3``, ``1 3``, ``1 2 3``."""
    rank = {item: place for place, item in enumerate(goal)}
    return [" ".join(sorted(items[:count], key=rank.__getitem__)) for count in range(1, len(items) + 1)]


def compared(numbers: Sequence[str], bound: str) -> list[str]:
    """Each number beside the bound: ``6.4>5.1``."""
    limit = Decimal(bound)
    signs = ("<" if Decimal(number) < limit else ">" if Decimal(number) > limit else "=" for number in numbers)
    return [f"{number}{sign}{bound}" for number, sign in zip(numbers, signs, strict=True)]


def needed(note: str, magazine: str) -> list[str]:
    """Each letter of the note, how often it is needed and how often it is there: ``t2/1``."""
    return [f"{letter}{note.count(letter)}/{magazine.count(letter)}" for letter in dict.fromkeys(note)]


def paired(first: str, second: str) -> str:
    """The letters of two words side by side: ``odd``, ``egg`` to ``oe dg dg``."""
    return " ".join(map("".join, zip(first, second, strict=False)))


def legs(animals: Mapping[str, int]) -> list[str]:
    """Legs of each kind and of all so far: two birds and an ant as ``2*2=4, 4``, ``1*6=6, 10``."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS  # type: ignore[import-untyped]

    total, lines = 0, []
    for animal, count in animals.items():
        total += count * ANIMALS[animal]
        lines.append(f"{count}*{ANIMALS[animal]}={count * ANIMALS[animal]}, {total}")
    return lines
