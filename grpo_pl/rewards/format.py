"""``FormatReward``: rewards completions of the form ``<think>…</think><answer>…</answer>``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from grpo_pl.rewards.base import PerCompletionReward, Score
from grpo_pl.rewards.completion_text import BOX, answer_block, is_blank, last_boxed

Failure = Literal[
    "no think", "no answer", "unclosed answer", "no box", "empty answer", "several boxes", "text beside the box",
    "tags repeated or out of order", "text outside the blocks",
]  # fmt: skip
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAG = re.compile("(</?(?:think|answer)>)")
_IN_THE_ANSWER: frozenset[Failure] = frozenset({"no box", "empty answer", "several boxes", "text beside the box"})


def format_failures(completion: str, *, require_box: bool = True, allow_text: bool = False) -> list[Failure]:
    r"""The departures of a completion from ``<think>…</think><answer>\boxed{…}</answer>``; empty if it has that form.

    ``no think``, ``no answer``, ``unclosed answer``: a block is missing or not closed. ``no box``, ``several boxes``,
    ``text beside the box``: the last answer block is not one filled box with balanced braces. Without ``require_box``
    any text will do but none at all (``empty answer``); with ``allow_text`` text may stand beside the box. ``tags
    repeated or out of order`` and ``text outside the blocks`` are checked only where both blocks are complete.
    """
    failures: list[Failure] = []
    think, think_end = completion.find("<think>"), completion.find("</think>")
    if think < 0 or think_end < think:
        failures.append("no think")
    block = answer_block(completion)
    if block is None:
        return [*failures, "no answer"]
    closed = "</answer>" in completion[completion.rfind("<answer>") :]
    if not closed:
        failures.append("unclosed answer")
    fault = _answer_fault(block.strip(), require_box=require_box, allow_text=allow_text)
    if fault is not None and (closed or fault == "no box"):
        failures.append(fault)
    if "no think" in failures or not closed:
        return failures
    if tuple(_TAG.findall(completion)) != _TAGS:
        failures.append("tags repeated or out of order")
    elif _tags_in_place(completion) < len(_TAGS):
        failures.append("text outside the blocks")
    return failures


def is_one_box(text: str) -> bool:
    r"""True if ``text`` is a single ``\boxed{…}`` with balanced braces, and nothing but white space around it."""
    stripped = text.strip()
    opening = BOX.match(stripped)
    content = last_boxed(stripped)
    return opening is not None and content is not None and stripped == f"{opening.group()}{content}}}"


def _answer_fault(block: str, *, require_box: bool, allow_text: bool) -> Failure | None:
    if not require_box:
        return "empty answer" if is_blank(block) else None
    if is_blank(last_boxed(block) or ""):
        return "no box"
    if len(BOX.findall(block)) > 1:
        return "several boxes"
    return None if allow_text or is_one_box(block) else "text beside the box"


def has_proper_tags(completion: str) -> bool:
    """True if each block of ``completion`` is opened and closed once, the thoughts before the answer: no tag is nested,
    repeated, missing or out of order. Either block may be left out."""
    tags = tuple(_TAG.findall(completion))
    return tags in ((), _TAGS[:2], _TAGS[2:], _TAGS)


def _tags_in_place(completion: str) -> int:
    """The number of the four tags that occur exactly once, in order, and with only white space on their outer side:
    before an opening tag or after a closing one, up to the neighbouring tag or the end of the text. The tags of an
    answer do not count within a thought that is still open."""
    pieces = _TAG.split(completion)  # texts, and a tag between each two of them
    last, kept = 0, 0
    for tag in _TAGS:
        place = pieces.index(tag) if pieces.count(tag) == 1 else 0
        thinks = "<think>" in pieces[:place] and "</think>" not in pieces[:place]
        if place > last and not (thinks and "answer" in tag):
            last = place
            outside = pieces[place + 1 if tag.startswith("</") else place - 1]
            kept += not outside.strip()
    return kept


@dataclass(kw_only=True)
class FormatReward(PerCompletionReward):
    r"""Rewards the form of a completion, whatever its answer; range {0, 1} strict, {0, ¼, ½, ¾, 1} partial.

    Strict: 1 if the whole text is ``<think>…</think><answer>\boxed{…}</answer>``, each tag exactly once, white space
    around and between allowed, and the answer block is one box with balanced braces and nothing else; else 0. With
    ``allow_text`` text may stand beside the one box in the answer block, without ``require_box`` the block may hold
    any text that is not empty.

    Partial: ``max(0, (n − a) / 4)``. n counts the tags that occur exactly once, in order, and with only white space on
    their outer side, so text between the blocks costs both tags next to it; those of an answer count only outside of
    the thoughts. a is 1 if there is an answer block that is not as the strict form requires. A policy that does not
    know the format yet is rewarded for each tag, and the value is 1 exactly where the strict one is.

    Text that the template prefilled is part of the completion, so a prompt that ends in ``<think>`` costs nothing.
    ``detail`` names the failures, see `format_failures`.
    """

    trusted = True
    name: str = "format"
    partial: bool = False
    """Give credit for each tag instead of all or nothing."""
    require_box: bool = True
    r"""The answer must hold one ``\boxed{…}`` in which something can be seen."""
    allow_text: bool = False
    """Text may stand beside the box in the answer."""

    def score(self, completion: str, gold: str) -> Score:
        failures = format_failures(completion, require_box=self.require_box, allow_text=self.allow_text)
        if not failures:
            return Score(1.0, "ok")
        lost = not _IN_THE_ANSWER.isdisjoint(failures)
        tags = _tags_in_place(completion)
        value = max(0.0, (tags - lost) / 4) if self.partial else 0.0
        return Score(value, "no_answer" if "no answer" in failures else "wrong", ", ".join(failures))
