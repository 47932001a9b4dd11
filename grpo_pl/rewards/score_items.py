"""``score_items``: what the rewards of a model say of completions, with the group's answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_pl.rewards.base import Reward, correctness_index
from grpo_pl.rewards.batch import score_completions
from grpo_pl.rewards.voting import answer_classes

_SHOWN = 1000  # characters of an extracted answer


class ScoreItems(NamedTuple):
    """Request to score ``completions[i]`` against ``answers[i]``."""

    completions: list[str]
    answers: Sequence[str | None]
    columns: Mapping[str, list[Any]]
    group_size: int = 0
    """Completions per problem, which are neighbours: their answers are also numbered for majority votes. 0: no
    groups."""


def score_items(rewards: Sequence[Reward], job: ScoreItems, part: slice) -> list[dict[str, Any]]:
    """Scores the completions of ``part`` of a job, which covers whole groups if it has groups.

    Returns:
        Per completion: weighted sum, status and verdict of the correctness reward, the answer that it read (at most
        ``_SHOWN`` characters; None for no answer, or all of the text), scores of all rewards, with groups its answer
        class, and the time of the call in ms.

    Raises:
        MissingColumn: a column that a reward needs is missing.
        Exception: whatever a reward raises, see ``score_completions``.
    """
    began = time.perf_counter()
    completions = job.completions[part]
    columns = {name: column[part] for name, column in job.columns.items()}
    scored = score_completions(rewards, completions=completions, answers=job.answers[part], columns=columns)
    place = correctness_index(rewards)
    judge = rewards[place or 0]  # without a correctness reward it only tells where it would look for an answer
    stated, correct, classes = judge.stated_answers(completions, columns), scored.correct(), list[int]()
    if job.group_size:
        classes = answer_classes(
            judge, completions=completions, scores=scored.judged(), columns=columns, group_size=job.group_size
        )
    milliseconds = round((time.perf_counter() - began) * 1000, 3)
    items = []
    for row, (score, total, answer) in enumerate(zip(scored.judged(), scored.totals(), stated, strict=True)):
        said = answer.strip()
        is_part = place is not None and score.status != "no_answer" and said not in ("", completions[row].strip())
        items.append(
            {
                "value": total,
                "status": score.status,
                "correct": correct[row],
                "rewards": scored.described(row),
                "extracted": said[:_SHOWN] if is_part else None,
                **({"answer_class": classes[row]} if job.group_size else {}),
                "ms": milliseconds,
            }
        )
    return items
