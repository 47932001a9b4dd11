"""Reading cells of rows: gold answers, conversations, questions that are equal or can be guessed, and filter files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_pl.files.rows import line_name, read_lines

if TYPE_CHECKING:  # torch, which a client of the server does without
    from grpo_pl.types import Conversation, Problem

DIGESTS = "image_digests"
"""Column of the digests of a row's images, in files that are written here."""
_OPTION = re.compile(r"(?:^|[\s(\[{*])\(?\\?(?:text(?:bf|rm)?\{)?\(?([A-Ha-h])\}?[).:\]]")
_CHOICE = re.compile(r"\(?\\?(?:text(?:bf|rm)?\s*\{)?\s*\(?([A-Ha-h])\)?\s*\}?\)?\.?")
_TRUTH = re.compile(r"\(?\\?(?:text(?:bf|rm)?\s*\{)?\s*(?:true|false|yes|no)\s*\}?\)?\.?", re.IGNORECASE)


def check_pattern(pattern: str | None) -> None:
    """Refuses an ``answer_pattern`` that cannot find an answer."""
    if pattern is None:
        raise ValueError(
            "answer_pattern is null: leave it out to take the whole column. What begins with # is a comment in YAML "
            "unless it stands in quotes, such as '####\\s*(.+)'."
        )
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"answer_pattern {pattern!r} is no regular expression: {error}") from error
    if groups < 1:
        raise ValueError(f"answer_pattern {pattern!r} needs a group, such as '####\\s*(.+)'.")


def gold_in(cell: Any, pattern: str) -> str | None:
    """The gold answer in a cell: the first group of the last match of ``pattern``, or all of it; None without one."""
    if not is_text(cell):
        return None
    if not pattern:
        return str(cell).strip() or None
    found = [match[1] for match in re.finditer(pattern, str(cell))]
    return (found[-1] or "").strip() or None if found else None


def read_kept(path: str) -> set[str]:
    """The `asked_key` of each problem in a file that ``grpo-pl filter`` wrote.

    Raises:
        ValueError: no such file, or a line that is none of a filter, by its number.
    """
    questions = set()
    file = Path(path).expanduser()
    try:
        for number, _, row in read_lines(file):
            cell = row.get("question")
            if not isinstance(cell, str) and not is_conversation(cell):
                raise ValueError(f"{line_name(file, number)} was not written by `grpo-pl filter`: it has no question.")
            question = cell if isinstance(cell, str) else conversation_text(conversation_in(cell, parts=True))
            questions.add(" ".join([normal_question(question), *row.get(DIGESTS, ())]))
    except OSError as error:
        raise ValueError(f"cannot read data.source.kept {path!r}: {error.strerror}.") from error
    return questions


def is_text(cell: Any) -> bool:
    """True if a cell holds something to read."""
    return isinstance(cell, str | int | float) and str(cell).strip() != ""


def unreadable(column: str, cell: Any) -> str:
    """What to say of a cell that is no question or answer: its column, content, and its type unless it is a text."""
    told = f"{column} {str(cell)[:60]!r}"
    return told if isinstance(cell, str) else f"{column} is null" if cell is None else f"{told}, {type(cell).__name__}"


def is_conversation(cell: Any) -> bool:
    """True if a cell looks like a list of messages."""
    return isinstance(cell, list | tuple) and bool(cell) and all(isinstance(m, Mapping) and "role" in m for m in cell)


def conversation_in(cell: Any, *, parts: bool = False, images: str = "") -> Conversation:
    """The messages in a cell; keys without a value are left out, because a table gives every message all keys.

    Args:
        parts: a content may be a list of parts, which are not looked at.
        images: what to do about images where parts are refused, for the message.

    Raises:
        ValueError: no list of messages, a role or content that cannot be asked with, or turns in a wrong order.
    """
    if not is_conversation(cell):
        raise ValueError(f"a conversation is a list of messages with role and content, got {str(cell)[:60]!r}.")
    messages = tuple({key: value for key, value in message.items() if value is not None} for message in cell)
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    wrong = next((role for role in turns if role not in ("user", "assistant")), None)
    if wrong is not None:
        raise ValueError(f"roles are user and assistant, after one system message at most; found {wrong!r} in {roles}.")
    if not turns or turns[-1] != "user":
        raise ValueError(f"the last message must be the user's, found {roles}.")
    for content in (message.get("content") for message in messages):
        if parts and isinstance(content, list | tuple) and content:
            continue
        if not is_text(content) or not isinstance(content, str):
            told = f"the content of every message must be a text, got {str(content)[:60]!r}"
            raise ValueError(f"{told}; {images}" if images and _has_image(content) else told)
    return messages


def _has_image(content: Any) -> bool:
    parts = content if isinstance(content, list | tuple) else ()
    return any(isinstance(part, Mapping) and str(part.get("type")).startswith("image") for part in parts)


def conversation_text(messages: Conversation) -> str:
    """The question as text: the user's turn, or all turns with their roles; the system message is no question."""
    turns = [message for message in messages if message["role"] != "system"]
    if len(turns) == 1:
        return content_text(turns[0]["content"])
    return "\n\n".join(f"{turn['role']}: {content_text(turn['content'])}" for turn in turns)


def content_text(content: Any) -> str:
    """The text of a message: of parts those that are texts, a line each."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return str(content)


def image_digests(problem: Problem) -> list[str]:
    """The digest of each image that the policy sees; in a run on text, whatever the column holds, none."""
    images = problem.columns.get("images")
    return [image.sha256 for image in images if hasattr(image, "sha256")] if isinstance(images, tuple) else []


def written_images(problem: Problem) -> dict[str, list[str]]:
    """The columns with its images in a row that is written: as ``data:`` URLs, and their digests; nothing without."""
    digests = image_digests(problem)
    return {"images": [image.data_url() for image in problem.columns["images"]], DIGESTS: digests} if digests else {}


def asked_key(problem: Problem) -> str:
    """The `normal_question`, with the digests of its images: equal for problems that ask the same."""
    return " ".join([normal_question(problem.question), *image_digests(problem)])


def normal_question(question: str) -> str:
    """A question in lower case, with single spaces: equal for questions that differ in nothing else."""
    return " ".join(question.split()).casefold()


def is_multiple_choice(question: str, answer: str) -> bool:
    """True if the answer is a letter and the question lists options: at least ``A)`` and ``B)``, ``(a)`` …, in order.

    Kimi k1.5 (arXiv:2501.12599, section 2.1) leaves such problems out: they reward guessing.
    """
    if not _CHOICE.fullmatch(answer.strip()):
        return False
    letters = [letter.upper() for letter in _OPTION.findall(question)]
    return "A" in letters and "B" in letters[letters.index("A") :]


def is_true_or_false(answer: str) -> bool:
    """True if the answer is yes or no, true or false: half of all guesses are right."""
    return _TRUTH.fullmatch(answer.strip()) is not None
