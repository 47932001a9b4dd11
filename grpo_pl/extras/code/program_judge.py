"""Runs programs for ``CodeReward`` inside a sandbox worker.

A job is a question and a program. The question says how to run it (``input``, or ``steps`` that ask for values), the
limits, and which levels of isolation will do; it holds no expected output. The verdict is ``ok`` with JSON of what came
out, or ``unavailable`` where this machine has none of the levels.
"""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

from grpo_pl.extras.code import program_run
from grpo_pl.extras.code.program_isolation import LEVELS, IsolationUnavailable, start_supervisor

TRIAL = """
import os, sys
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
print(refused(os.fork) and refused(open, "/etc/passwd") and refused(os.listdir, "/proc") and refused(os.kill, 1, 0))
"""
"""Prints True if the program is isolated."""
ERROR_BYTES = 4096
"""Bytes of standard error that are kept, from its end."""

_names: dict[str, Any] = {}
_supervisors: dict[str, socket.socket] = {}
_faults: dict[str, str] = {}


def prepare() -> None:
    """Imports what programs may use, and tries which levels of isolation this machine has."""
    _names.update(program_run.prepare())
    judge(json.dumps({"levels": LEVELS, "level": True}), "", 0.0)


def judge(question: str, program: str, relative_tolerance: float) -> tuple[str, str]:
    """(status, what came out, or why nothing could be run)."""
    asked = json.loads(question)
    level = next(filter(_is_available, asked["levels"]), None)
    if level is None:
        faults = "; ".join(f"{name}: {_faults[name]}" for name in asked["levels"])
        return "unavailable", faults
    if asked.get("level"):
        return "ok", level
    return "ok", json.dumps(_run(_supervisors[level], asked, program))


def _is_available(level: str) -> bool:
    """True if this machine has this level; the first call starts a supervisor and tries it out."""
    if level not in _supervisors and level not in _faults:
        try:
            supervisor = _supervisors[level] = start_supervisor(level, _names)
            limits = {"cpu_s": 10.0, "wall_s": 60.0, "memory_bytes": 2**30, "output_bytes": 1000}
            found = _run(supervisor, {"input": "", "steps": None, "limits": limits}, TRIAL)
            if found["output"] != "True\n":
                raise IsolationUnavailable(f"a program is not isolated: {found}")
        except (IsolationUnavailable, OSError) as error:
            _faults[level] = str(error)
            _supervisors.pop(level, None)
    return level in _supervisors


def _run(supervisor: socket.socket, asked: dict[str, Any], program: str) -> dict[str, Any]:
    """Runs a program; returns its end (``cause``, ``code``), ``output``, last ``errors`` and ``results``."""
    limits = asked["limits"]
    task = _in_memory(json.dumps({"program": program, "steps": asked["steps"]}).encode())
    stdin = _in_memory(asked["input"].encode("utf-8", "surrogatepass"))
    pipes = [os.pipe() for _ in range(3)]
    theirs = [task, stdin, *(write for _, write in pipes)]
    socket.send_fds(supervisor, [json.dumps(limits).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    texts, ended, over = _collect(supervisor, [read for read, _ in pipes], limits["output_bytes"])
    output, errors, results = (text.decode("utf-8", "replace") for text in texts)
    return {
        "cause": "output" if over and ended["cause"] in ("stopped", "ended") else ended["cause"],
        "code": ended["code"],
        "output": output,
        "errors": errors,
        "results": results.splitlines(),
    }


def _collect(supervisor: socket.socket, pipes: list[int], most: int) -> tuple[list[bytearray], dict[str, Any], bool]:
    """Reads until the program has ended; of too much output, what fits, and the program is stopped."""
    texts, ended, over = [bytearray() for _ in pipes], None, False
    poll = select.poll()
    for source in (supervisor.fileno(), *pipes):
        poll.register(source, select.POLLIN)
    is_open = set(pipes)
    while ended is None or is_open:
        for source, _ in poll.poll():
            if source == supervisor.fileno():
                reply = supervisor.recv(4096)
                if not reply:
                    os._exit(1)  # without its supervisor the worker is of no use; the pool starts another
                ended = json.loads(reply)
                poll.unregister(source)
            elif part := os.read(source, 2**16):
                index = pipes.index(source)
                texts[index] += part
                if index == 1:
                    del texts[index][:-ERROR_BYTES]
                elif len(texts[0]) + len(texts[2]) > most:
                    del texts[index][max(0, len(texts[index]) - (len(texts[0]) + len(texts[2]) - most)) :]
                    if not over and ended is None:
                        supervisor.send(b"stop")
                    over = True
            else:
                poll.unregister(source)
                is_open.remove(source)
                os.close(source)
    return texts, ended, over


def _in_memory(content: bytes) -> int:
    """A descriptor of a file without a name that holds ``content``, at its start."""
    descriptor = os.memfd_create("program")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
