"""The process that runs math-verify, or another judge, on untrusted answers; started by ``sandbox``, never imported.

It exchanges JSON with its parent over standard input, a socket. It receives an object of settings, sends
``{"ready": true}``, and then sends one reply per job. A job is ``[gold, answer, soft, hard]``: both texts inside a box,
and the limits in seconds; a reply is ``{"status": …, "detail": …, "last": …}``, where ``last`` says that the process
ends itself after this job because its memory has grown too much.

Both limits count CPU seconds, so that a busy machine does not turn right answers into time-outs. The soft limit raises
an exception in Python code; the hard limit ends the process, also while C code runs that handles no signals.

SymPy objects never leave this process and are never turned into text, because ``str`` of one may never return.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
from multiprocessing.connection import Connection
from typing import Any

IDLE_CHECK_S = 1.0
"""Seconds between two checks of an idle worker whether its parent still runs."""
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


def _load_judge(file: str, data: str) -> Any:
    """``judge`` of a file next to this one, or anywhere, loaded by path: the package may not be importable here.

    Judges ``WARM_UP`` first, which builds parser tables and does late imports, so that no real job pays for them; nor
    for looking for garbage among what was imported, which stays.
    """
    gc.disable()
    names = runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), file))
    if data:
        names["prepare"](data)
    names["judge"](*names.get("WARM_UP", ("x^2+1", "(x+1)^2")), 0.0)
    gc.freeze()
    gc.enable()
    return names["judge"]


def _resident_bytes() -> int:
    """Resident memory in bytes. ``ru_maxrss`` is not used on Linux: it starts at the peak of the parent process, which
    may be a training process of many GiB."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux; on macOS ru_maxrss is in bytes and belongs to this program alone
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limit_process(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end ends this process
    signal.signal(signal.SIGPROF, _on_alarm)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # the kernel ends a worker stuck in C, with or without a parent


def _run_job(judge: Any, job: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    global _armed
    gold, answer, soft, hard = job
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
    last = last or _resident_bytes() > settings["memory_limit_mb"] * 2**19
    return {"status": status, "detail": detail, "last": last}


def main() -> None:
    parent = os.getppid()
    link: Connection[Any, Any] = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # a library that reads standard input must not read the protocol

    def send(message: dict[str, Any]) -> None:
        link.send_bytes(json.dumps(message).encode("ascii"))

    settings = json.loads(link.recv_bytes())
    try:
        judge = _load_judge(settings["judge"], settings["data"])
    except Exception as error:  # the parent shows it to the user
        send({"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    _limit_process(settings["memory_limit_mb"] * 2**20)
    send({"ready": True})
    while True:
        while not link.poll(IDLE_CHECK_S):
            if os.getppid() != parent:  # another process may hold our pipe open
                return
        reply = _run_job(judge, json.loads(link.recv_bytes()), settings)
        send(reply)
        if reply["last"]:
            return


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):
        os._exit(0)
