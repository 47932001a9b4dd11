"""``DemonstrationRows``: rows of files or of the hub that are demonstrations, each read when a step shows it."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

from grpo_pl.data.demonstrations import Demonstration, by_turn, later_turns
from grpo_pl.data.rows import EXAMPLES_SHOWN
from grpo_pl.data.tables import ROWS_AT_ONCE, TableReader, load_table
from grpo_pl.environment import text_of
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.functional.sampling import row_key

Side = Literal["train", "val"]
SIDES: tuple[Side, ...] = ("val", "train")
Message = Mapping[str, Any]
Row = Mapping[str, Any]
Judge = Callable[[Sequence[Demonstration]], Sequence[str | None]]
"""What is wrong with each demonstration, for the model that is to learn it; None where nothing is."""


class SortedRows(NamedTuple):
    """What `DemonstrationRows.sort` found."""

    numbers: Mapping[Side, Sequence[int]]
    """Of the rows to train on and of those held out, in their order."""
    notes: Sequence[str]
    """Lines to print about rows that were left out."""
    digest: str
    """Of the rows to train on, as they are read."""


@dataclass(kw_only=True)
class DemonstrationRows:
    """One row is one demonstration, in a form that TRL's ``SFTTrainer`` reads as well: a prompt and its completion, as
    texts or as lists of messages, or ``messages``, in which all that the assistant says is learned.

    A text that is a prompt is a question and goes through ``model.template``; so does the last of several messages,
    whose system message takes the place of ``model.template.system``. A row may offer tools: JSON schemas in a column
    ``tools``, or their JSON text. Other columns are ignored.
    """

    path: str
    """Name on the hub, a local file (.jsonl, .ndjson, .json, .csv, .tsv, each also with .gz, or .parquet), a folder of
    such that ``datasets`` can read, or a folder of ``save_to_disk``."""
    subset: str | None = None
    """Configuration of a hub data set."""
    train_split: str = "train"
    """Split to train on."""
    val_split: str | None = None
    """Split of held-out rows; null holds out ``val_share`` of the training split."""
    val_path: str | None = None
    """A further local file or folder of held-out rows, instead of ``val_split``."""
    val_share: float = 0.05
    """Share of the prompts that is held out where nothing else is said about it, chosen by a hash of the prompt; 0
    holds out none."""
    prompt: str = "prompt"
    """Column of the prompt."""
    completion: str = "completion"
    """Column of the completion."""
    messages: str = "messages"
    """Column of a whole conversation, in rows that have one."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that nothing can be learned from as they are, such as those longer than the model's context: refuse to
    start, or leave them out and say how many."""

    _readers: dict[Side, TableReader] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_within("[0, 1)", "data.rows", val_share=self.val_share)
        if self.val_split is not None and self.val_path is not None:
            raise ValueError("data.rows: give val_split or val_path, not both.")

    @property
    def separate(self) -> bool:
        """True if held-out rows have a file or split of their own."""
        return self.val_split is not None or self.val_path is not None

    def reader(self, side: Side) -> TableReader:
        """The rows to train on, or the held-out ones; these are the training rows unless they are `separate`."""
        if side == "val" and not self.separate:
            side = "train"
        if side not in self._readers:
            path, split, name = self.path, self.train_split, self.path
            if side == "val":
                path, split = self.val_path or self.path, self.val_split or "train"
                name = self.val_path or f"{self.path} ({self.val_split})"
            self._readers[side] = TableReader(load_table(path, self.subset, split, written=()), name)
        return self._readers[side]

    def read(self, side: Side, numbers: Sequence[int]) -> list[Demonstration]:
        """The demonstrations in rows that were found good."""
        return [self.demonstration(row) for row in self.reader(side).read(numbers)]

    def demonstration(self, row: Row) -> Demonstration:
        """The demonstration in a row.

        Raises:
            ValueError: it has none of the forms, or nothing to learn; what is wrong.
        """
        given = {name for name in (self.prompt, self.completion, self.messages) if row.get(name) is not None}
        if self.messages in given:
            said = _messages(self.messages, row[self.messages])
            first = next((i for i, message in enumerate(said) if message["role"] == "assistant"), len(said))
            asked, learned = said[:first], said[first:]
        elif lacking := [name for name in (self.prompt, self.completion) if name not in given]:
            raise ValueError(
                f"it has no {' and no '.join(lacking)}, and no {self.messages}; its columns are {', '.join(row)}"
            )
        else:
            asked = _messages(self.prompt, row[self.prompt], "user")
            learned = _messages(self.completion, row[self.completion], "assistant")
        if not asked or asked[-1]["role"] != "user":
            raise ValueError("what the assistant answers must end with a message of the user")
        turns = by_turn(learned)
        roles = [[message["role"] for message in turn] for turn in turns]
        if roles[0] != ["assistant"] or any(len(turn) < 2 or turn[-1] != "assistant" for turn in roles[1:]):
            raise ValueError(
                "what is learned must begin and end with a message of the assistant, and something must stand between "
                f"two; found {[role for turn in roles for role in turn]}"
            )
        question = asked[0]["content"] if len(asked) == 1 else tuple(asked)
        shown = Demonstration(question, learned[0]["content"], later_turns(turns[1:]), _tools(row.get("tools")))
        if not all(text.strip() for text in (shown.completion, *(action for _, action in shown.further))):
            raise ValueError("its completion is empty")
        return shown

    def texts(self) -> Iterator[str]:
        """The text of each row that is a demonstration."""
        for side in SIDES if self.separate else SIDES[1:]:
            for _, row in self.reader(side).scan():
                with suppress(ValueError):  # `sort` refuses it
                    shown = self.demonstration(row)
                    yield f"{text_of(shown.question)}{shown.text}"

    def sort(self, judge: Judge) -> SortedRows:
        """Reads every row once, and says which are trained on and which are held out.

        Raises:
            ValueError: no rows to train on or none held out, or bad ones, with the file and their numbers.
        """
        numbers: dict[Side, array[int]] = {"train": array("q"), "val": array("q")}
        held_out, notes, repeated = set[int](), list[str](), 0
        digest = hashlib.blake2b(digest_size=16)
        for side in SIDES if self.separate else SIDES[1:]:
            bad, shown = 0, list[str]()
            for number, row, shows in self._judged(self.reader(side), judge):
                if isinstance(shows, str):
                    bad += 1
                    shown += [f"row {number}: {shows}"] if len(shown) < EXAMPLES_SHOWN else []
                    continue
                key = row_key("held out", text_of(shows.question))
                if side == "val" or (not self.separate and key % 10_000 < 10_000 * self.val_share):
                    numbers["val"].append(number)
                    held_out.add(key)
                elif key in held_out:
                    repeated += 1
                else:
                    numbers["train"].append(number)
                    digest.update(json.dumps(row, default=str).encode())
            if bad:
                reader = self.reader(side)
                told = f"{bad} of {reader.starts[-1]} rows of {reader.name!r} cannot be learned from"
                told += f" ({'; '.join(shown)}{' …' if bad > len(shown) else ''})"
                if self.bad_rows == "refuse":
                    raise ValueError(f"{told}: mend them, or set data.rows.bad_rows to drop.")
                notes.append(f"{told}; left out.")
        if repeated:
            notes.append(f"{repeated} training rows left out: their prompts are held out.")
        if not numbers["train"]:
            raise ValueError(f"{self.path!r} has no rows to train on{f': {notes[0]}' if notes else '.'}")
        if not numbers["val"] and (self.separate or self.val_share):
            name = self.reader("val").name
            raise ValueError(
                f"{name!r} has no held-out rows: raise data.rows.val_share, or set it to 0 to hold out none."
            )
        return SortedRows(numbers, tuple(notes), digest.hexdigest())

    def _judged(
        self, reader: TableReader, judge: Judge
    ) -> Iterator[tuple[int, Mapping[str, Any], Demonstration | str]]:
        """Number and content of each row, and its demonstration or what is wrong with it."""
        rows = reader.scan()
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            found: list[Demonstration | str] = []
            for _, row in chunk:
                try:
                    found.append(self.demonstration(row))
                except ValueError as error:
                    found.append(str(error))
            faults = iter(judge([each for each in found if not isinstance(each, str)]))
            for (number, row), each in zip(chunk, found, strict=True):
                fault = None if isinstance(each, str) else next(faults)
                yield number, row, each if fault is None else fault


def _messages(name: str, value: Any, role: str = "") -> list[Message]:
    """Chat messages; where ``role`` is given, a text is one message of that role."""
    if isinstance(value, str) and role:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        expected = "a text or a list of messages" if role else "a list of messages"
        raise ValueError(f"its {name} must be {expected}, got {value!r:.60}")
    found: list[Message] = []
    for message in value:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"a message of its {name} must have role and content, both text, got {dict(message)!r:.80}"
            )
        if message.get("tool_calls"):
            raise ValueError("a message has tool_calls: write them into its content, as the policy is to write them")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"its {name} holds {half!r}, half a surrogate pair, which is no character") from error
        found.append({"role": message["role"], "content": message["content"]})
    return found


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"its tools are no JSON: {value!r:.60}") from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"its tools must be a list of JSON schemas, got {value!r:.60}")
    return tuple(dict(tool) for tool in value)
