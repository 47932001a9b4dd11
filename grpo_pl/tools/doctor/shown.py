"""Some prompts of a rollout exactly as the policy read them, with what it answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_pl.training.experience import Experience
from grpo_pl.types import CUT_OFF

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Prompts, and answers to each."""


@dataclass(frozen=True, kw_only=True)
class ShownAnswer:
    """A completion and what became of it."""

    text: str
    """As rewards see it."""
    reward: float | None
    status: str
    """Of the correctness reward."""
    cut: bool
    """A limit ended it."""


@dataclass(frozen=True, kw_only=True)
class ShownPrompt:
    """A prompt with its first completions."""

    prompt: str
    """All of its tokens, special ones too."""
    gold: str
    answers: Sequence[ShownAnswer]


def shown_prompts(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> list[ShownPrompt]:
    """The first prompts of a rollout, with the first answers to each."""
    samples, rollout, scored = experience.samples, experience.rollout, experience.scored
    judged, totals = scored.judged(), scored.totals()
    shown = []
    for index, problem in enumerate(samples.prompts[:SHOWN]):
        first = index * rollout.group_size
        ids = rollout.prompt_ids[first][rollout.prompt_mask[first]].tolist()
        answers = [
            ShownAnswer(
                text=samples.completions[row],
                reward=totals[row],
                status=judged[row].status,
                cut=rollout.finish_reasons[row] in CUT_OFF,
            )
            for row in range(first, first + min(SHOWN, rollout.group_size))
        ]
        prompt = str(tokenizer.decode(ids, skip_special_tokens=False))
        shown.append(ShownPrompt(prompt=prompt, gold=problem.answer, answers=answers))
    return shown


def lines_of(shown: Sequence[ShownPrompt]) -> Iterator[str]:
    """For a terminal: texts begin with a bar, so that their own lines and spaces can be seen."""
    for number, one in enumerate(shown, 1):
        yield f"prompt {number} of {len(shown)}, gold answer {one.gold!r}:"
        yield from _barred(one.prompt)
        for which, answer in enumerate(one.answers, 1):
            reward = "no reward" if answer.reward is None else f"reward {answer.reward:.3g}"
            yield f"answer {which}, {reward}, {answer.status}{', cut off' if answer.cut else ''}:"
            yield from _barred(answer.text)


def _barred(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield "  |" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
