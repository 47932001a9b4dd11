"""``FormatReward``: does a completion keep to ``<think>…</think><answer>…</answer>``?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_pl.rewards.answer_text import last_boxed
from grpo_pl.rewards.base import Reward, Score

Failure = Literal["no think", "no answer", "unclosed answer", "no box"]
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STRICT = re.compile(r"\s*<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def format_failures(completion: str, *, require_box: bool = True) -> list[Failure]:
    r"""What is missing: no think block, no answer block, an answer block that is not closed, no ``\boxed{…}`` in it."""
    failures: list[Failure] = []
    think, think_end = completion.find("<think>"), completion.find("</think>")
    if think < 0 or think_end < think:
        failures.append("no think")
    start = completion.rfind("<answer>")
    if start < 0:
        failures.append("no answer")
        return failures
    end = completion.find("</answer>", start)
    if end < 0:
        failures.append("unclosed answer")
    if require_box and not (last_boxed(completion[start : end if end >= 0 else None]) or "").strip():
        failures.append("no box")
    return failures


def answer_block(completion: str) -> str | None:
    """What the last ``<answer>`` holds, up to its end or the end of the text; ``None`` without one."""
    start = completion.rfind("<answer>")
    return None if start < 0 else completion[start + len("<answer>") :].split("</answer>", 1)[0]


@dataclass(kw_only=True)
class FormatReward(Reward):
    r"""Rewards the form of a completion, whatever its answer; range {0, 1} strict, {0, ¼, ½, ¾, 1} partial.

    Strict: 1 if the whole text is ``<think>…</think><answer>…</answer>``, each tag exactly once, white space between
    and around allowed, and the answer holds a box if ``require_box``; else 0.

    Partial: ``(tags that occur exactly once and in order) / 4``, less ¼ (not below 0) for a missing box. It gives a
    policy that knows no format yet something to climb.

    Both see the text that the template prefilled, so a prompt that ends in ``<think>`` costs nothing. ``detail``
    names the failures: ``no think``, ``no answer``, ``unclosed answer``, ``no box``.
    """

    name: str = "format"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right."""
    partial: bool = False
    """Give credit tag by tag instead of all or nothing."""
    require_box: bool = True
    r"""The answer must hold a ``\boxed{…}`` that is not empty."""

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [self._one(completion) for completion in completions]

    def _one(self, completion: str) -> Score:
        failures = format_failures(completion, require_box=self.require_box)
        value = self._partial(completion, failures) if self.partial else self._strict(completion, failures)
        if value == 1.0:
            return Score(1.0, "ok")
        status: Literal["no_answer", "wrong"] = "no_answer" if "no answer" in failures else "wrong"
        return Score(value, status, ", ".join(failures) or "tags repeated, out of order, or text outside of them")

    @staticmethod
    def _strict(completion: str, failures: list[Failure]) -> float:
        once = all(completion.count(tag) == 1 for tag in _TAGS)
        return float(once and not failures and _STRICT.fullmatch(completion) is not None)

    @staticmethod
    def _partial(completion: str, failures: list[Failure]) -> float:
        position, kept = -1, 0
        for tag in _TAGS:
            found = completion.find(tag)
            if completion.count(tag) == 1 and found > position:
                position, kept = found, kept + 1
        return max(0.0, (kept - ("no box" in failures)) / 4)
