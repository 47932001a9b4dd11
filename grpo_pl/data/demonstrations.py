"""Demonstrations from a file: questions and the completions to be imitated, as written by ``grpo-pl predict``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_pl.data.image_limits import IMAGE_COLUMNS
from grpo_pl.environment import Observation, text_of
from grpo_pl.files.rows import Row, line_name, parsed_lines, read_lines
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Conversation

T = TypeVar("T")


@dataclass(frozen=True)
class Demonstration:
    """A question as it stands in a data set, before any template, and a whole completion, prefill included."""

    question: str | Conversation
    completion: str
    further: Sequence[tuple[Observation, str]] = ()
    """Of an episode: each later observation, and the action that followed it."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the agent of the episode offered."""
    told_tools: str = ""
    """Their text in the system message, where the chat template has no place for them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the problem, whose images a policy may read."""

    @property
    def text(self) -> str:
        """All that follows the question."""
        return self.completion + "".join(f"{text_of(observation)}{action}" for observation, action in self.further)


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    """Reads JSON Lines in one of the forms that TRL's ``SFTTrainer`` reads as well.

    - ``{"prompt": "347+285=", "completion": "<think>…"}``
    - ``{"prompt": [{"role": "user", "content": "347+285="}], "completion": [{"role": "assistant", "content": "…"}]}``
    - ``{"messages": [{"role": "user", …}, {"role": "assistant", …}]}``

    Where the assistant speaks several times it is an episode, and what stands between is an observation each.
    What the user says is the question and goes through the run's own template; a system message is left out for the
    same reason. Other keys are ignored.

    Raises:
        ValueError: no such file, no demonstration in it, or a line that has none of these forms, by its number.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"cold_start.demonstrations: no such file: {file}")
    found = list(parsed_lines(file, _demonstration))
    if not found:
        raise ValueError(f"{file} holds no demonstrations.")
    return found


def refuse_images(path: str | Path) -> None:
    """Refuses a file of demonstrations with images, which are not read.

    Raises:
        ValueError: a line has an image in a column, by its number.
    """
    for number, _, row in read_lines(Path(path)):
        if (name := next((name for name in IMAGE_COLUMNS if row.get(name)), None)) is not None:
            raise ValueError(
                f"{line_name(path, number)} has a column {name!r}, and images of demonstrations in files are not read "
                "yet: leave the column out, or let the prompt source make the demonstrations."
            )


def draw_in_passes(rows: Sequence[T], *, step: int, count: int, seed: int) -> list[T]:
    """The ``count`` rows of a step: pass after pass over all of them, each pass in another order."""
    total = len(rows)
    drawn: list[T] = []
    for epoch in range(step * count // total, ((step + 1) * count - 1) // total + 1):
        order = random.Random(row_key(seed, "demonstrations", epoch)).sample(range(total), total)
        first, last = (min(max(index - epoch * total, 0), total) for index in (step * count, (step + 1) * count))
        drawn += [rows[i] for i in order[first:last]]
    return drawn


def _demonstration(row: Row) -> Demonstration:
    if "messages" in row:
        messages = _messages(row["messages"])
    elif "prompt" in row and "completion" in row:
        messages = [*_messages(row["prompt"], "user"), *_messages(row["completion"], "assistant")]
    else:
        raise ValueError("needs the keys prompt and completion, or messages.")
    said = by_turn(messages)
    roles = [[message.get("role") for message in turn] for turn in said]
    if roles[0] != ["user", "assistant"] or any(len(turn) < 2 or turn[-1] != "assistant" for turn in roles):
        raise ValueError(
            "a demonstration is one turn of the user and one of the assistant, and of an episode what comes of it and "
            f"the next; found {[role for turn in roles for role in turn]}."
        )
    return Demonstration(str(said[0][0]["content"]), str(said[0][1]["content"]), later_turns(said[1:]))


def by_turn(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """What is read before each turn of the assistant, and that turn; what follows the last one, too."""
    said: list[list[Mapping[str, Any]]] = [[]]
    for message in messages:
        if said[-1] and said[-1][-1].get("role") == "assistant":
            said.append([])
        said[-1].append(message)
    return said


def later_turns(turns: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[tuple[Observation, str], ...]:
    """``Demonstration.further`` of turns, each of which is the messages that are read and one of the assistant."""
    further: list[tuple[Observation, str]] = []
    for *messages, action in turns:
        alone = [message.get("role") for message in messages] == ["user"]  # then a text is enough
        further.append((str(messages[0]["content"]) if alone else messages, str(action["content"])))
    return tuple(further)


def _messages(value: Any, role: str = "") -> list[Mapping[str, Any]]:
    """Chat messages but the system's; where ``role`` is given, a text is one message of that role."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    good = isinstance(value, list) and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in value)
    if not good:
        raise ValueError("messages must be a list of objects with role and content, both text.")
    return [message for message in value if message.get("role") != "system"]
