"""The process that runs math-verify, or another judge, on untrusted answers; started by ``worker_threads``.

It exchanges messages with its parent: it receives settings as JSON, answers with nothing when it is ready, or with what
went wrong, and then sends one reply per job. A job is ``[key, gold, answer, soft, hard]``: a text that the reply
repeats, both texts inside a box, and the limits in seconds; a reply is ``{"key": …, "status": …, "detail": …,
"last": …}``, where ``last`` says that the process ends itself after this job because its memory has grown too much.

Both limits count CPU seconds, so that a busy machine does not turn right answers into time-outs. The soft limit raises
an exception in Python code; the hard limit ends the process, also while C code runs that handles no signals.

SymPy objects never leave this process and are never turned into text, because ``str`` of one may never return. What is
imported here starts with every worker, so this file imports the standard library and ``processes`` alone.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
from typing import Any

from grpo_pl.processes.channel import Channel
from grpo_pl.processes.modules import load_module
from grpo_pl.processes.resource_limits import limit_memory, resident_bytes, set_limit

REPEAT_S = 0.05
"""Seconds after which the soft limit fires again, in case library code has caught the exception."""


class SoftLimit(BaseException):
    """Raised by the timer; not an ``Exception``, so that ``except Exception`` inside SymPy lets it through."""


_armed = False


def _on_alarm(signum: int, frame: Any) -> None:
    if _armed:
        raise SoftLimit


def _disarm() -> None:
    """Stops the timer; catches the exception of a signal that arrives meanwhile."""
    global _armed
    while True:
        try:
            _armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            return
        except SoftLimit:
            continue


def _run_job(judge: Any, job: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    global _armed
    key, gold, answer, soft, hard = job
    last = False
    try:
        try:
            _armed = True
            signal.setitimer(signal.ITIMER_PROF, soft, REPEAT_S)
            signal.setitimer(signal.ITIMER_VIRTUAL, hard)
            status, detail = judge(gold, answer, settings["relative_tolerance"])
        finally:
            _disarm()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except SoftLimit:
        status, detail = "timeout", f"over {soft:g} s"
    except MemoryError:
        status, detail, last = "crashed", f"over {settings['memory_limit_mb']} MB", True
    except RecursionError:
        status, detail = "crashed", "nested too deeply"
    except Exception as error:  # SymPy raises all kinds of exceptions on malformed input; none may end the worker
        status, detail = "wrong", f"cannot be compared ({type(error).__name__})"
    last = last or resident_bytes() > settings["memory_limit_mb"] * 2**19
    return {"key": key, "status": status, "detail": detail, "last": last}


def main(channel: Channel, parent: int) -> None:
    """Answers jobs until the parent closes the channel."""
    settings = json.loads(channel.receive())
    gc.disable()
    try:
        judge: Any = load_module(settings["judge"])
        if hasattr(judge, "prepare"):  # builds tables and does late imports, so that no job pays for them
            judge.prepare(*([settings["data"]] if settings["data"] else []))
    except Exception as error:  # the parent shows it to the user
        channel.send(f"{type(error).__name__}: {error}".encode(errors="replace"))
        return
    gc.freeze()  # nor for looking for garbage among what was imported, which stays
    gc.enable()
    set_limit(resource.RLIMIT_CORE, 0, for_good=True)
    limit_memory(settings["memory_limit_mb"] * 2**20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this process
    signal.signal(signal.SIGPROF, _on_alarm)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # the kernel ends a worker stuck in C, with or without a parent
    channel.send(b"")
    while True:
        reply = _run_job(judge.judge, json.loads(channel.receive()), settings)
        channel.send(json.dumps(reply).encode("ascii"))
        if reply["last"]:
            return
