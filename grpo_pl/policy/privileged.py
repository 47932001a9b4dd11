"""``PrivilegedText``: what a policy reads besides the question where it is its own teacher."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.rewards.base import Reward
from grpo_pl.types import Conversation, Problem

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
FROM_ROLLOUT = {
    "feedback": "what a reward says of the completion",
    "right": "another right completion of the group",
    "best": "a completion of the group with a higher reward",
}
"""Names that stand for texts of a rollout; all others are columns of the data set."""


@dataclass(frozen=True, kw_only=True)
class PrivilegedText:
    """The teacher's question: the policy's own, with texts that the policy does not see."""

    user: str = "{question}\n\n{privileged}"
    """The teacher's question, to which model.template is applied: ``{question}`` is the problem's, ``{privileged}``
    stands for ``texts``, and all other braces stay as they are."""
    texts: list[str] = field(default_factory=lambda: ["{solution}"])
    """Texts one after the other. A name in braces is a column of the data set, such as ``{solution}``, or ``{answer}``,
    the gold answer; ``{feedback}``, the ``detail`` of a reward; ``{right}``, the first other completion of the group
    that the correctness reward accepts; ``{best}``, the completion of the group with the highest reward, if that is
    higher than its own. A text is left out where one of its names has nothing; where all are left out, the completion
    has no teacher."""
    feedback_of: str | None = None
    """Name of the reward whose ``detail`` is the feedback; null takes the correctness reward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", [self.texts] if isinstance(self.texts, str) else list(self.texts))
        for name in ("{question}", "{privileged}"):
            if name not in self.user:
                raise ValueError(f"privileged.user must contain '{name}', got {self.user!r}.")
        plain = next((text for text in self.texts if not _NAME.search(text)), None)
        if plain is not None or not self.texts:
            raise ValueError(
                f"privileged.texts: {plain or self.texts!r} names nothing: write a column or one of "
                f"{', '.join(FROM_ROLLOUT)} in braces, such as {{solution}}."
            )

    @property
    def names(self) -> set[str]:
        """All names in ``texts``."""
        return {name for text in self.texts for name in _NAME.findall(text)}

    @property
    def columns(self) -> set[str]:
        """The names that are columns of the data set."""
        return self.names - FROM_ROLLOUT.keys() - {"answer"}

    def asked(self, problem: Problem, found: Mapping[str, str] | None = None) -> str | Conversation | None:
        """The teacher's question or conversation; None where there is nothing to add.

        Args:
            found: texts of the rollout, by the names of ``FROM_ROLLOUT``.
        """
        values = {**_texts(problem.columns), "answer": problem.answer, **(found or {})}
        parts = [text for text in self.texts if all(values.get(name) for name in _NAME.findall(text))]
        if not parts:
            return None
        said = "".join(_NAME.sub(lambda match: values[match[1]], text) for text in parts)
        if problem.messages is None:
            return self._around(problem.question, said)
        last = problem.messages[-1]
        return (*problem.messages[:-1], {**last, "content": self._around(str(last["content"]), said)})

    def check_columns(self, problems: Iterable[Problem], rewards: Iterable[Reward]) -> None:
        """Refuses a column that none of ``problems`` has, and feedback of a reward that is not there."""
        shown = list(problems)
        for name in sorted(self.columns):
            if not any(name in problem.columns for problem in shown):
                there = ", ".join(sorted({column for problem in shown for column in problem.columns})) or "none"
                raise ValueError(
                    f"model.privileged.texts names {{{name}}}, and no problem has a column {name!r} (there are: "
                    f"{there}); texts of the rollout are {', '.join(FROM_ROLLOUT)}."
                )
        names = [reward.name for reward in rewards]
        if self.feedback_of is not None and self.feedback_of not in names:
            raise ValueError(
                f"model.privileged.feedback_of is {self.feedback_of!r}, and the rewards are {', '.join(names)}."
            )

    def _around(self, question: str, said: str) -> str:
        before, _, after = self.user.partition("{question}")
        return "".join((before.replace("{privileged}", said), question, after.replace("{privileged}", said)))


def _texts(columns: Mapping[str, Any]) -> dict[str, str]:
    """The columns that hold something, as texts."""
    return {name: str(value) for name, value in columns.items() if value is not None}
