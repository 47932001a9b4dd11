"""Where in a completion its answer may stand: behind the thoughts, in ``<answer>``, in a box."""

from __future__ import annotations

from grpo_pl.rewards.mathematics.answer_text import last_boxed


def answer_block(completion: str) -> str | None:
    """The content of the last ``<answer>``, up to ``</answer>`` or else the end of the text; ``None`` without one."""
    start = completion.rfind("<answer>")
    return None if start < 0 else completion[start + len("<answer>") :].split("</answer>", 1)[0]


def boxed_or_block(completion: str) -> str:
    r"""The content of the last ``\boxed{…}``, else of the last ``<answer>``; ``""`` if there is neither."""
    return last_boxed(completion) or answer_block(completion) or ""


def stated_answer(completion: str) -> str:
    r"""The answer of a completion: its last ``\boxed{…}``, else its last ``<answer>``, else all of its text."""
    return (boxed_or_block(completion) or completion).strip()


def after_thinking(completion: str) -> str:
    """The text after the last ``</think>`` (the whole text if there is none), up to the next ``<think>``."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]
