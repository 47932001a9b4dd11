"""``PerSource``: one reward that uses a different reward for each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from grpo_pl.rewards.background import call_together
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score
from grpo_pl.rewards.batch import score_one
from grpo_pl.rewards.logged_extras import logging_for


@dataclass(kw_only=True)
class PerSource(Reward):
    """Scores each completion with the reward of the source that its problem comes from (column ``source``).

    Its range is that of these rewards. As the correctness reward of a mixture it says for each source what a right
    answer is. ``weight`` and ``correctness`` are those given here; those of the inner rewards are ignored.
    """

    trusted = True
    name: str = "per_source"
    rewards: dict[str, Reward] = field(default_factory=dict)
    """Source name (as in ``MixturePrompts.parts``) -> its reward."""

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError(f"reward {self.name!r} has no `rewards`: give one for each source.")

    def stated_answers(self, completions: Sequence[str], columns: Columns) -> list[str]:
        sources = columns.get("source", [""] * len(completions))
        return [
            self.rewards[source].stated_answers([text], {})[0]
            for text, source in zip(completions, sources, strict=True)
        ]

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        sources = columns.get("source", [""] * len(completions))
        unknown = sorted(set(sources) - self.rewards.keys())
        if unknown:
            raise MissingColumn(
                f"reward {self.name!r} has no reward for the source {unknown[0]!r}: the column 'source' must be one of "
                f"{', '.join(map(repr, sorted(self.rewards)))}."
            )
        parts = {name: [row for row, of in enumerate(sources) if of == name] for name in dict.fromkeys(sources)}

        def score(name: str) -> list[Score]:
            rows = parts[name]
            with logging_for(rows):
                return score_one(
                    self.rewards[name],
                    [completions[row] for row in rows],
                    [answers[row] for row in rows],
                    {column: [values[row] for row in rows] for column, values in columns.items()},
                )

        found = call_together([(self.rewards[name].asynchronous, partial(score, name)) for name in parts])
        scores: dict[int, Score] = {}
        for rows, part in zip(parts.values(), found, strict=True):
            scores.update(zip(rows, part, strict=True))
        return [scores[row] for row in range(len(completions))]
