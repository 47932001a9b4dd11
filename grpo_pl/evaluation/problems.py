"""``EvalProblem``: one problem of an evaluation, from a row of a file or a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, Tag, model_validator

from grpo_pl.data.cells import conversation_in, conversation_text
from grpo_pl.openai_format.fields import MAX_ITEMS, Body, Text, by_type
from grpo_pl.types import Conversation

MAX_COLUMNS = 64
"""Most further fields of one problem."""
MAX_TEXT = 1 << 20
"""Most characters of a gold answer."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


def _conversation(messages: list[Any]) -> Sequence[Mapping[str, Any]]:
    read = conversation_in(messages, images="images stand in a column image or images, for a policy that reads them")
    for message in read:
        if not str(message["content"]).isascii():
            str(message["content"]).encode()  # a lone surrogate is a ValueError
    return read


_Conversation = Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS), AfterValidator(_conversation)]


class EvalProblem(Body):
    """One problem of an evaluation; further fields are columns for the rewards."""

    ignored = None
    problem: Annotated[
        Annotated[Text, Tag("a text")] | Annotated[_Conversation, Tag("a list")],
        by_type("a text or a list of messages", {str: "a text", list: "a list"}),
    ]
    answer: Annotated[
        Annotated[Text, Field(max_length=MAX_TEXT), Tag("a text")]
        | Annotated[list[Any], Tag("a list")]
        | Annotated[dict[str, Any], Tag("an object")],
        by_type("a text", {str: "a text", list: "a list", dict: "an object"}),
    ]
    """The gold answer; completions against a list or an object have the status ``bad_gold``."""
    id: (
        Annotated[
            Annotated[Seed, Tag("a number")] | Annotated[Text, Tag("a text")],
            by_type("an integer or a text", {int: "a number", str: "a text"}),
        ]
        | None
    ) = None

    @property
    def gold(self) -> str | None:
        """The answer, or None for one that is no text."""
        return self.answer if isinstance(self.answer, str) else None

    @property
    def asked(self) -> str | Conversation:
        """The problem as templates read it."""
        return self.problem if isinstance(self.problem, str) else tuple(self.problem)

    @property
    def question(self) -> str:
        """The problem as text, as rewards see it."""
        return self.asked if isinstance(self.asked, str) else conversation_text(self.asked)

    @model_validator(mode="after")
    def _few_columns(self) -> Self:
        if len(self.model_extra or {}) > MAX_COLUMNS:
            raise ValueError(f"give at most {MAX_COLUMNS} further fields")
        return self
