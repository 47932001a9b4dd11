"""Finds equal answers within a group, for majority voting; the correctness reward decides which are equal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from grpo_pl.rewards.base import Columns, Reward, Score

RIGHT, NO_ANSWER = 0, -1
_COSTLY = frozenset({"timeout", "killed", "crashed", "too_long"})


def answer_classes(
    reward: Reward, *, completions: Sequence[str], scores: Sequence[Score], columns: Columns, group_size: int
) -> list[int]:
    """Numbers the answers of each group, so that a majority can be counted: equal numbers are equal answers.

    Right answers are all in class 0. For wrong answers, the first answer of each class takes the place of the gold
    answer, and an answer joins the first class against which ``reward`` calls it right; so ``1/2`` and ``0.5`` vote
    together. An answer that was too costly to judge (``timeout``, ``killed``, ``crashed``, ``too_long``) is compared
    as text only, and so are all where ``reward`` raises. ``reward`` is called at most once per class of the group with
    the most classes; each call covers all groups.

    Args:
        reward: the correctness reward.
        completions: B texts, the completions of one prompt as neighbours.
        scores: the B scores of ``reward`` against the gold answers.
        columns: the columns that ``reward`` got for those scores, B values each.
        group_size: completions per prompt; divides B.

    Returns:
        B integers: 0 for right, 1 … for wrong answers in order of appearance in their group, -1 for no answer.
    """
    stated = reward.stated_answers(completions, columns)
    classes = [  # None: a wrong answer whose class is not known yet
        RIGHT if score.correct else NO_ANSWER if score.status == "no_answer" else None for score in scores
    ]
    judged = [score.status not in _COSTLY for score in scores]
    number = 0
    while None in classes:
        number += 1
        pairs: list[tuple[int, int]] = []  # (completion, completion whose answer takes the place of the gold answer)
        for start in range(0, len(completions), group_size):
            undecided = [i for i in range(start, start + group_size) if classes[i] is None]
            if undecided:
                first, *others = undecided
                classes[first] = number
                for i in others:
                    if stated[i] == stated[first]:
                        classes[i] = number
                    elif judged[i] and judged[first]:
                        pairs.append((i, first))
        mine = [i for i, _ in pairs]
        picked = {name: [column[i] for i in mine] for name, column in columns.items()}
        same: Sequence[Score | None] = [None] * len(pairs)
        try:
            same = reward([completions[i] for i in mine], [stated[j] for _, j in pairs], picked) if pairs else []
        except Exception as error:  # a function of the user may expect more of a gold answer than of an answer
            told = f"{type(error).__name__}: {error}"[:200]
            warnings.warn(
                f"reward {reward.name!r} cannot compare answers, votes go by their text: {told}", stacklevel=2
            )
        for i, score in zip(mine, same, strict=True):
            classes[i] = number if score is not None and score.correct else None
    return [NO_ANSWER if answer is None else answer for answer in classes]
