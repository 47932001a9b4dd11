"""Runs programs for ``CodeReward`` inside a sandbox worker.

A job is a question and a program. The question says how to run it (``input``, or ``steps`` that ask for values), the
limits, and which walls will do; it holds no expected output. The verdict is ``ok`` with JSON of what came out, or
``unavailable`` where none of the walls can be put up here.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import socket
from typing import Any

_room = runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "program_room.py"))
LEVELS: tuple[str, ...] = _room["LEVELS"]
TRIAL = """
import os, sys
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
print(refused(os.fork) and refused(open, "/etc/passwd") and refused(os.listdir, "/proc") and refused(os.kill, 1, 0))
"""
"""Prints True if the walls hold."""
ERROR_BYTES = 4096
"""How much of standard error is kept: its end."""

_names: dict[str, Any] = {}
_links: dict[str, socket.socket] = {}
_faults: dict[str, str] = {}


def prepare(data: str) -> None:
    """Imports what programs may use, and tries which walls can be put up.

    Args:
        data: not used.
    """
    _names.update(_room["_run"]["prepare"]())
    judge(json.dumps({"levels": LEVELS, "level": True}), "", 0.0)


def judge(question: str, program: str, relative_tolerance: float) -> tuple[str, str]:
    """(status, what came out, or why nothing could be run)."""
    asked = json.loads(question)
    level = next(filter(_stands, asked["levels"]), None)
    if level is None:
        faults = "; ".join(f"{name}: {_faults[name]}" for name in asked["levels"])
        return "unavailable", faults
    if asked.get("level"):
        return "ok", level
    return "ok", json.dumps(_run(_links[level], asked, program))


def _stands(level: str) -> bool:
    """Whether there is a room of this level; the first question for it opens one and tries it."""
    if level not in _links and level not in _faults:
        try:
            link = _links[level] = _room["open_room"](level, _names)
            limits = {"cpu_s": 10.0, "wall_s": 60.0, "memory_bytes": 2**30, "output_bytes": 1000}
            found = _run(link, {"input": "", "steps": None, "limits": limits}, TRIAL)
            if found["output"] != "True\n":
                raise _room["NoRoom"](f"the walls do not hold: {found}")
        except (_room["NoRoom"], OSError) as error:
            _faults[level] = str(error)
            _links.pop(level, None)
    return level in _links


def _run(link: socket.socket, asked: dict[str, Any], program: str) -> dict[str, Any]:
    """How a program ended (``cause``, ``code``), its ``output``, the end of its ``errors``, and the ``results``."""
    limits = asked["limits"]
    task = _in_memory(json.dumps({"program": program, "steps": asked["steps"]}).encode())
    stdin = _in_memory(asked["input"].encode("utf-8", "surrogatepass"))
    pipes = [os.pipe() for _ in range(3)]
    theirs = [task, stdin, *(write for _, write in pipes)]
    socket.send_fds(link, [json.dumps(limits).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    texts, ended, over = _collect(link, [read for read, _ in pipes], limits["output_bytes"])
    output, errors, results = (text.decode("utf-8", "replace") for text in texts)
    return {
        "cause": "output" if over and ended["cause"] in ("stopped", "ended") else ended["cause"],
        "code": ended["code"],
        "output": output,
        "errors": errors,
        "results": results.splitlines(),
    }


def _collect(link: socket.socket, pipes: list[int], most: int) -> tuple[list[bytearray], dict[str, Any], bool]:
    """Reads until the program has ended; of too much output, what fits, and the program is stopped."""
    texts, ended, over = [bytearray() for _ in pipes], None, False
    poll = select.poll()
    for source in (link.fileno(), *pipes):
        poll.register(source, select.POLLIN)
    is_open = set(pipes)
    while ended is None or is_open:
        for source, _ in poll.poll():
            if source == link.fileno():
                reply = link.recv(4096)
                if not reply:
                    os._exit(1)  # without its keeper the worker is of no use; the pool starts another
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
                        link.send(b"stop")
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
