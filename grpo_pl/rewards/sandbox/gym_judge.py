"""Scores answers with reasoning-gym inside a sandbox worker.

Several of reasoning-gym's scorers pass the answer to ``eval``, or to SymPy's ``parse_expr``, which calls ``eval`` with
more names. After `prepare` ``eval`` evaluates literals and arithmetic only, expressions may call only functions of
numbers, and the process can neither write files nor start programs nor open connections.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import sys
from typing import Any

import reasoning_gym  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

from grpo_pl.rewards.sandbox.gym_entry import GymProblem, pack, unpack
from grpo_pl.rewards.sandbox.gym_guards import PANEL, enough, literal_or_arithmetic, objection

LONGEST_EXPRESSION = 2000
CALLABLE = frozenset({"sqrt", "exp", "log", "ln", "abs", "Abs", "sin", "cos", "tan", "asin", "acos", "atan"})
"""Functions that an expression may call; any other name is a symbol, which must not be followed by a bracket."""
_HARMFUL = re.compile(
    r"[^\x20-\x7e\n\t]|__|[\"'`\\:;=@#\[\]{}<>&|~]|\.\s*[A-Za-z_]|\)\s*\(|"
    r"\b(?:lambda|for|if|else|import|or|and|not|is|in)\b"  # `x or y` is x: two answers in one
)
_CALL = re.compile(r"(?<!\w)[^\WA-Za-z_]*+([A-Za-z_]\w*+)\s*+\(")
_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "tempfile.", "urllib.", "webbrowser.")
_ALLOWED = frozenset({"os.listdir", "os.scandir", "os.walk"})
_real_parse_expr = sympy_parser.parse_expr


def prepare() -> None:
    """Takes from this process, for good, what scorers must not do."""
    sympy.parse_expr = sympy_parser.parse_expr = harmless_parse_expr
    for name, loaded in list(sys.modules.items()):
        if name.startswith(("reasoning_gym", "sympy")) and getattr(loaded, "parse_expr", None) is _real_parse_expr:
            loaded.parse_expr = harmless_parse_expr  # type: ignore[attr-defined]
        if name.startswith("reasoning_gym"):
            loaded.eval, loaded.exec = literal_or_arithmetic, _no_code  # type: ignore[attr-defined]
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    judge(pack(GymProblem("countdown", {}, entry)), entry["answer"], 0.0)  # does late imports
    sys.addaudithook(_refuse)


def judge(gold: str, answer: str, relative_tolerance: float) -> tuple[str, str]:
    """(status, value as text, or the reason for no value) of an answer.

    The value is 1 for a right answer; else the scorer's partial credit if it exceeds what constant answers earn, or 0.

    Args:
        gold: the problem as ``gym_entry.pack`` writes it.
        answer: the answer of the completion.
        relative_tolerance: not used; each scorer has its own.
    """
    try:
        problem = unpack(gold)
        dataset = _dataset(problem)
    except Exception as error:  # the fault is in the settings or the entry: the completion is not to blame
        return "bad_gold", f"{type(error).__name__}: {error}"
    if reason := objection(problem.task, answer, problem.entry):
        return "wrong", reason
    value = float(dataset.score_answer(answer, problem.entry))
    if not math.isfinite(value):
        return "wrong", f"scored {value}"
    if value >= 1.0:
        for part in enough(problem.task, answer):
            if float(dataset.score_answer(part, copy.deepcopy(problem.entry))) >= 1.0:
                return "wrong", "more than the answer"
        return "ok", "1.0"
    return "wrong", repr(value if value > 0.0 and value > _thoughtless(gold) else 0.0)


@functools.lru_cache(maxsize=256)
def _thoughtless(gold: str) -> float:
    """The largest value below 1 that the scorer gives to a constant of ``PANEL``, or to the question, as an answer."""
    problem = unpack(gold)
    dataset, best = _dataset(problem), 0.0
    for constant in (*PANEL, problem.entry.get("question", "")):
        try:
            value = float(dataset.score_answer(constant, copy.deepcopy(problem.entry)))  # some scorers write into it
        except Exception:  # a constant that the scorer cannot read earns nothing
            continue
        if best < value < 1.0:
            best = value
    return best


_datasets: dict[str, Any] = {}


def _dataset(problem: Any) -> Any:
    """The data set whose scorer belongs to a problem; cached, one for all problems of a task with equal settings."""
    key = f"{problem.task} {sorted(problem.settings.items())!r}"
    if key not in _datasets:
        if len(_datasets) >= 64:
            _datasets.clear()
        _datasets[key] = reasoning_gym.create_dataset(problem.task, size=1, seed=0, **problem.settings)
    return _datasets[key]


def harmless_parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
    """``parse_expr`` for arithmetic only.

    Raises:
        ValueError: the text calls, subscripts or names anything else.
    """
    if not isinstance(text, str) or len(text) > LONGEST_EXPRESSION or _HARMFUL.search(text):
        raise ValueError("not an arithmetic expression")
    if set(_CALL.findall(text)) - CALLABLE:
        raise ValueError("not a function of numbers")
    return _real_parse_expr(text, *args, **kwargs)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook that forbids writing files, starting programs and opening connections; hooks cannot be removed."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _ALLOWED):
        raise PermissionError(f"a scorer tried {event}")


def _no_code(*args: Any) -> None:
    raise PermissionError("a scorer tried exec")
