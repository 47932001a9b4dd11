"""Which completions of a group give the same answer, by the correctness reward's own sense of the same."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_pl.rewards.base import Columns, Reward, Score
from grpo_pl.rewards.format import boxed_or_block

RIGHT, NO_ANSWER = 0, -1
_COSTLY = frozenset({"timeout", "killed", "crashed", "too_long"})


def answer_classes(
    reward: Reward,
    *,
    completions: Sequence[str],
    scores: Sequence[Score],
    columns: Columns,
    group_size: int,
) -> list[int]:
    """Numbers the answers of each group, so that a majority can be counted: equal numbers are equal answers.

    Right answers are all in class 0. A wrong one joins the first class whose answer ``reward`` takes it for when that
    answer is put in the place of the gold one, so ``1/2`` and ``0.5`` vote together; what was too costly to judge
    against the gold answer is only compared as text. The number of calls of ``reward`` is the number of different
    answers in the most divided group, each call over all groups at once.

    Args:
        reward: the correctness reward.
        completions: B texts, the completions of one prompt as neighbours.
        scores: what ``reward`` gave them against the gold answers.
        columns: what ``reward`` got beside them.
        group_size: completions of a prompt; divides B.

    Returns:
        B integers: 0 right, 1 … for wrong answers by order of appearance in their group, -1 for no answer.
    """
    stated = [stated_answer(completion) for completion in completions]
    classes = [  # None: a wrong answer, which others may share
        RIGHT if score.correct else NO_ANSWER if score.status == "no_answer" else None for score in scores
    ]
    judged = [score.status not in _COSTLY for score in scores]
    number = 0
    while None in classes:
        number += 1
        pairs: list[tuple[int, int]] = []  # completions, and those whose answer stands in for the gold one
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
        same = reward([completions[i] for i in mine], [stated[j] for _, j in pairs], picked) if pairs else []
        for i, score in zip(mine, same, strict=True):
            classes[i] = number if score.correct else None
    return [NO_ANSWER if answer is None else answer for answer in classes]


def stated_answer(completion: str) -> str:
    r"""What a completion commits to: its last ``\boxed{…}``, else its last ``<answer>``, else all of it."""
    return (boxed_or_block(completion) or completion).strip()
