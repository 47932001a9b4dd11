"""The process that runs math-verify on untrusted answers; started by ``sandbox``, never imported by the package.

It speaks length-prefixed JSON: a settings object comes in first, ``{"ready": true}`` goes out, then one reply a job.
A job is ``[gold, answer]``, both the text inside a box; a reply is ``{"status": …, "detail": …, "last": …}``, where
``last`` says that the process ends itself after this job because its memory has grown too much.

SymPy objects never leave this process and are never turned into text: ``str`` of one can run for ever.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import struct
import sys
from functools import lru_cache
from typing import Any

IDLE_CHECK_S = 1.0
"""How often an idle worker looks whether its parent is still there."""
REPEAT_S = 0.05
"""The soft limit fires again after this long, should library code have swallowed it."""


class SoftLimit(BaseException):
    """Raised by the timer; not an ``Exception``, so that ``except Exception`` inside SymPy lets it through."""


_armed = False


def _on_alarm(signum: int, frame: Any) -> None:
    if _armed:
        raise SoftLimit


def _disarm() -> None:
    """Stops the timer; a signal that arrives in between is taken here."""
    global _armed
    while True:
        try:
            _armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except SoftLimit:
            continue


def read_exactly(fd: int, count: int) -> bytes:
    """``count`` bytes from ``fd``; raises ``EOFError`` when the other side has gone."""
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_message(fd: int) -> Any:
    (size,) = struct.unpack(">I", read_exactly(fd, 4))
    return json.loads(read_exactly(fd, size))


def write_message(fd: int, message: Any) -> None:
    body = json.dumps(message).encode("ascii")
    data = struct.pack(">I", len(body)) + body
    while data:
        data = data[os.write(fd, data) :]


def _load_judge(relative_tolerance: float) -> Any:
    """Imports math-verify and returns ``judge(gold, answer) -> (status, detail)``."""
    import sympy  # type: ignore[import-untyped]
    from latex2sympy2_extended.logic import And as LazyAnd
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    logging.disable(logging.CRITICAL)
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    )
    extraction = [
        LatexExtractionConfig(
            try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=normalization
        )
    ]

    def read(text: str) -> Any:
        found = parse(
            f"\\boxed{{{text}}}",
            extraction_config=extraction,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        return found[0] if found else None

    def undefined(expr: Any) -> bool:
        return isinstance(expr, sympy.Basic) and expr.has(sympy.nan, sympy.zoo)

    def is_relation(expr: Any) -> bool:
        return isinstance(expr, (Relational, LazyAnd, sympy.And))

    def equal(gold: Any, answer: Any) -> bool:
        return bool(verify(gold, answer, float_rounding=6, numeric_precision=15, timeout_seconds=None))

    def names_a_value(expr: Any) -> bool:
        """``x = 5`` and ``f(2) = 5``, not ``6 = 5``, ``1 = 2 = 5`` or ``x + y = 5``."""
        return isinstance(expr, sympy.Eq) and isinstance(expr.lhs, (sympy.Symbol, AppliedUndef))

    def allowed(gold: Any, answer: Any) -> str:
        """Why ``answer`` cannot be an answer to ``gold`` whatever its value, or an empty string."""
        if undefined(answer):
            return "undefined value"
        if not is_relation(answer):
            return ""
        if not getattr(answer, "free_symbols", None):
            return "relation between numbers"
        if not is_relation(gold) and isinstance(answer, sympy.Eq) and not names_a_value(answer):
            return "equation where a value was asked for"
        if not is_relation(gold) and isinstance(answer, (LazyAnd, sympy.And)) and not isinstance(gold, sympy.Set):
            return "several relations where a value was asked for"
        return ""

    def far_apart(gold: Any, answer: Any) -> bool:
        """Rounding to six places makes all tiny numbers equal, so constants must agree in relative terms as well."""
        if not (isinstance(gold, sympy.Expr) and gold.is_number):
            return False
        value = answer.rhs if isinstance(answer, sympy.Eq) else answer
        if not (isinstance(value, sympy.Expr) and value.is_number):
            return False
        g, a = gold.doit().evalf(20), value.doit().evalf(20)
        if not (g.is_number and a.is_number) or g.is_infinite:
            return False
        return bool(abs(a - g) > relative_tolerance * abs(g))

    @lru_cache(maxsize=512)
    def read_gold(text: str) -> tuple[Any, str]:
        gold = read(text)
        if gold is None:
            return None, "cannot be parsed"
        if undefined(gold):
            return None, "undefined value"
        if not equal(gold, gold):
            return None, "not equal to itself"
        return gold, ""

    def judge(gold_text: str, answer_text: str) -> tuple[str, str]:
        gold, fault = read_gold(gold_text)
        answer = read(answer_text)
        if gold is None:
            return ("wrong", fault) if undefined(answer) else ("bad_gold", fault)
        if answer is None:
            return "wrong", "cannot be parsed"
        fault = allowed(gold, answer)
        if fault:
            return "wrong", fault
        if not equal(gold, answer):
            return "wrong", ""
        if far_apart(gold, answer):
            return "wrong", "tiny numbers that differ"
        return "ok", ""

    return judge


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _limit_process(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this process
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # the kernel ends a worker that is stuck in C without a parent


def _run_job(judge: Any, job: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    global _armed
    last = False
    try:
        try:
            _armed = True
            signal.setitimer(signal.ITIMER_REAL, settings["soft_limit_s"], REPEAT_S)
            signal.setitimer(signal.ITIMER_VIRTUAL, settings["hard_limit_s"] + 1.0)
            status, detail = judge(*job)
        finally:
            _disarm()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except SoftLimit:
        status, detail = "timeout", f"over {settings['soft_limit_s']:g} s"
    except MemoryError:
        status, detail, last = "crashed", f"over {settings['memory_limit_mb']} MB", True
    except RecursionError:
        status, detail = "crashed", "nested too deeply"
    except Exception as error:  # SymPy raises all kinds of exceptions on malformed input; none may end the worker
        status, detail = "wrong", f"cannot be compared ({type(error).__name__})"
    last = last or _peak_bytes() > settings["memory_limit_mb"] * 2**19
    return {"status": status, "detail": detail, "last": last}


def main() -> None:
    parent = os.getppid()
    source, sink = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # what a library prints must not reach the protocol
    settings = read_message(source)
    try:
        judge = _load_judge(settings["relative_tolerance"])
        judge("x", "x")  # builds the parser tables, so that the first job is not charged for them
    except Exception as error:  # the parent shows it to the user
        write_message(sink, {"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    _limit_process(settings["memory_limit_mb"] * 2**20)
    write_message(sink, {"ready": True})
    while True:
        while not select.select([source], [], [], IDLE_CHECK_S)[0]:
            if os.getppid() != parent:  # another process may hold our pipe open
                return
        reply = _run_job(judge, read_message(source), settings)
        write_message(sink, reply)
        if reply["last"]:
            return


if __name__ == "__main__":
    try:
        main()
    except (EOFError, BrokenPipeError):
        os._exit(0)
