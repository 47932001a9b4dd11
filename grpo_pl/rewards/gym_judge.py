"""What a sandbox worker runs to score answers with reasoning-gym; loaded by path, never imported by the package.

Several of reasoning-gym's scorers hand the answer to ``eval``, or to SymPy's ``parse_expr``, which is ``eval`` with
more names. Here ``eval`` reads literals only, expressions may call nothing but functions of numbers, and after the
imports the process can neither write files nor start programs nor open connections.
"""

from __future__ import annotations

import ast
import base64
import functools
import os
import pickle
import re
import sys
from typing import Any

import reasoning_gym  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

LONGEST_EXPRESSION = 2000
CALLABLE = frozenset({"sqrt", "exp", "log", "ln", "abs", "Abs", "sin", "cos", "tan", "asin", "acos", "atan"})
"""Functions that an expression may call; other names are symbols and must not be followed by a bracket."""
READS_LITERALS = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")
"""Modules whose scorers call ``eval`` on the answer."""
_HARMFUL = re.compile(r"[^\x20-\x7e\n\t]|__|[\"'`\\:;=@\[\]{}]|\.\s*[A-Za-z_]|\)\s*\(|\b(?:lambda|for|if|import)\b")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "tempfile.", "urllib.", "webbrowser.")
_ALLOWED = frozenset({"os.listdir", "os.scandir", "os.walk"})
_real_parse_expr = sympy_parser.parse_expr


def judge(gold: str, answer: str, relative_tolerance: float) -> tuple[str, str]:
    """(status, value) of an answer; the value is reasoning-gym's own, as text.

    Args:
        gold: base64 of a pickle, made by our own side, of (task, settings, entry).
        answer: what the completion says.
        relative_tolerance: not used; scorers bring their own.
    """
    task, settings, entry = pickle.loads(base64.b64decode(gold))
    value = float(_dataset(task, tuple(sorted(settings.items()))).score_answer(answer, entry))
    return ("ok" if value >= 1.0 else "wrong"), repr(value)


@functools.lru_cache(maxsize=64)
def _dataset(task: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    return reasoning_gym.create_dataset(task, size=1, seed=0, **dict(settings))


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
    """An audit hook, which nothing can take away again."""
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_FORBIDDEN) and event not in _ALLOWED):
        raise PermissionError(f"a scorer tried {event}")


def _disarm() -> None:
    """Takes ``eval`` and its kin out of the scorers' reach, in the modules that are loaded and those that will be."""
    sympy.parse_expr = sympy_parser.parse_expr = harmless_parse_expr
    for name, loaded in list(sys.modules.items()):
        if name.startswith(("reasoning_gym", "sympy")) and getattr(loaded, "parse_expr", None) is _real_parse_expr:
            loaded.parse_expr = harmless_parse_expr  # type: ignore[attr-defined]
        if name.startswith("reasoning_gym") and name.endswith(READS_LITERALS):
            loaded.eval = ast.literal_eval  # type: ignore[attr-defined]


def _example() -> tuple[str, str]:
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    return base64.b64encode(pickle.dumps(("countdown", {}, entry))).decode(), entry["answer"]


_disarm()
WARM_UP = _example()
"""A first job, before limits hold."""
judge(*WARM_UP, 0.0)
sys.addaudithook(_refuse)
