"""Forms of completions: what is left when numbers and words are folded, and which forms were not there at first."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

FREQUENT, MIN_COMPLETIONS = 0.25, 4
"""A form is frequent if this share of the completions has it, and at least so many."""
RARE = 0.02
"""A form of at most this share of the completions of the first rollouts was not there at first."""
MOST_FORMS = 10_000
"""Most forms of the first rollouts that are kept; more than these come from free text only, where none is frequent."""

_MARKUP = re.compile(r"(</?[A-Za-z_]+>|\\[A-Za-z]+)")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]+")
_RUN = re.compile(r"[a0](?:[\s,.;:!?'\"’\-]*[a0])*")
_REPEATED_SIGN = re.compile(r"([^\w\s])\1+")


def skeleton(text: str) -> str:
    r"""``text`` with numbers folded to ``0``, words to ``a``, and runs of either to one of them.

    Tags and LaTeX commands stay, as do signs; of a sign in a row there are one or two. Blank lines go, and of lines
    that fold to the same there is one. So ``<think>7+5+0=12\n4+8+1=13\n</think>It is \boxed{632}.`` is
    ``<think>0+0+0=0</think>a\boxed{0}.``
    """
    pieces = _MARKUP.split(text)
    pieces[::2] = [
        "\n".join(name for name, _ in groupby(filter(None, map(_fold, p.splitlines())))) for p in pieces[::2]
    ]
    return "".join(pieces)


def forms_of(completion: str) -> tuple[str, str]:
    """The skeletons of a whole completion, and of its end: what stands behind the last ``</think>``, else its last
    line. Where thoughts are long and free, only ends can be alike."""
    _, closed, end = completion.rpartition("</think>")
    if not closed:
        end = completion.rstrip().rpartition("\n")[2]
    return skeleton(completion), skeleton(end)


@dataclass(frozen=True)
class NewForm:
    """A form that is frequent now and was not there at first."""

    skeleton: str
    share: float
    """Of the completions that have it now."""
    share_at_first: float


@dataclass
class FirstForms:
    """The forms of the first rollouts, by digest; bounded, and plain values for a checkpoint."""

    completions: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, forms: Iterable[tuple[str, str]]) -> None:
        """Counts the two forms of every completion."""
        for pair in forms:
            self.completions += 1
            for key in _keys(pair):
                if key in self.counts or len(self.counts) < MOST_FORMS:
                    self.counts[key] = self.counts.get(key, 0) + 1

    def new_forms(self, forms: Sequence[tuple[str, str]]) -> list[NewForm | None]:
        """For each completion the more frequent of its forms that is frequent and was not there at first, if any."""
        now = Counter(key for pair in forms for key in _keys(pair))
        return [self._newest(pair, now, len(forms)) for pair in forms]

    def _newest(self, pair: tuple[str, str], now: Mapping[str, int], total: int) -> NewForm | None:
        found = []
        for key, form in zip(_keys(pair), pair, strict=True):
            at_first = self.counts.get(key, 0) / max(1, self.completions)
            if now[key] >= max(MIN_COMPLETIONS, FREQUENT * total) and at_first <= RARE:
                found.append(NewForm(form, now[key] / total, at_first))
        return max(found, key=lambda form: form.share, default=None)


def _keys(pair: tuple[str, str]) -> list[str]:
    return [
        hashlib.blake2b(f"{part}/{form}".encode(errors="replace"), digest_size=8).hexdigest()
        for part, form in zip(("whole", "end"), pair, strict=True)
    ]


def _fold(line: str) -> str:
    folded = _WORD.sub("a", _NUMBER.sub("0", line))
    folded = _RUN.sub(lambda run: "a" if "a" in run.group() else "0", folded)
    return re.sub(r"\s+", " ", _REPEATED_SIGN.sub(r"\1\1", folded)).strip()
