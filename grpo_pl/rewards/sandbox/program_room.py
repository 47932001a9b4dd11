"""Shuts programs in: a keeper process that starts each program in a process of its own, behind one of two walls.

``namespaces``: a PID, network, mount, IPC and UTS namespace (and a user namespace where the worker is not root), a file
system that holds the standard library, read-only, and an empty folder of limited size, plus the filter. ``filter``: the
filter of ``program_filter.py`` alone, by which nothing can be opened, no process started and none signalled. In both, a
worker that is root gives each of its programs a user id that nobody else has.

Loaded by its path inside a sandbox worker, never imported. The keeper never holds a program, its input or its output:
it gets descriptors and hands them on, so that a program finds nothing of another in the memory that it was forked with.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import runpy
import select
import signal
import socket
import time
from typing import Any, NamedTuple

LEVELS = ("namespaces", "filter")
"""The stronger one first."""
FOLDER_BYTES, FOLDER_FILES = 16 * 2**20, 64
"""Size of the folder that a program may write to, and how many files it holds."""
TASKS, DESCRIPTORS = 64, 64
"""Most threads of a program, and most open files."""
PAUSE_S = 0.02
"""Seconds between two looks at the CPU time that a program has used."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_USER, _PID, _NETWORK, _MOUNTS, _IPC, _UTS = 0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000, 0x4000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 2,
)  # fmt: skip
_PARENT_DEATH = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_libc = ctypes.CDLL(None, use_errno=True)


def _beside(file: str) -> dict[str, Any]:
    """The global names of a file next to this one, loaded by path: the package may not be importable here."""
    return runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), file))


_filter, _run = _beside("program_filter.py"), _beside("program_run.py")


class Walls(NamedTuple):
    """What is around the programs of a keeper."""

    alone: bool
    """Whether it has namespaces of its own."""
    user: int | None
    """The user id that its programs get; None keeps that of the worker, which then is not root."""
    filter: Any
    names: dict[str, Any]


class NoRoom(Exception):
    """A wall cannot be put up on this machine; the message says which step failed."""


def open_room(level: str, names: dict[str, Any]) -> socket.socket:
    """Starts a keeper; returns the link to it. `send` asks it to run a program.

    Args:
        level: one of `LEVELS`.
        names: what ``program_run.prepare`` returned.

    Raises:
        NoRoom: this machine does not allow it.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root, user = os.geteuid() == 0, _free_user()
    child = os.fork()
    if child == 0:
        try:
            here.close()
            _open(level, there, root, user, names)
        except BaseException as error:
            there.send(json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)
    there.close()
    reply = json.loads(here.recv(4096) or b'{"fault": "its process ended"}')
    if "fault" in reply:
        here.close()
        os.waitpid(child, 0)
        raise NoRoom(reply["fault"])
    return here


def _open(level: str, link: socket.socket, root: bool, user: int, names: dict[str, Any]) -> None:
    """In a forked child of the worker: becomes the keeper, or the process that waits for it."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    alone = level == "namespaces"
    if alone:
        _leave_host(root)
        inner = os.fork()  # the first process in the new PID namespace: when it ends, the kernel ends all in there
        if inner:
            link.close()
            os.waitpid(inner, 0)
            os._exit(0)
        _end_with_parent()
        _build_root()
    walls = Walls(alone, user if root else None, _filter["compiled"](files=alone), names)
    link.send(b"{}")
    _keep(link, walls)


def _keep(link: socket.socket, walls: Walls) -> None:
    """Runs one program after another: limits and five descriptors in, how it ended out."""
    owner = "" if walls.user is None else f",uid={walls.user},gid={walls.user}"
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 4096, 5)
        if not message:
            os._exit(0)
        limits = json.loads(message)
        if walls.alone:
            options = f"size={FOLDER_BYTES},nr_inodes={FOLDER_FILES},mode=0700{owner}"
            _mount("folder", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, options)
        program = os.fork()
        if program == 0:
            _shut_in(descriptors, limits, walls)
        for descriptor in descriptors:
            os.close(descriptor)
        reply = _watch(program, link, limits)
        if walls.alone:
            _sweep()
            _check(_libc.umount2(b"/tmp", _DETACH), "umount /tmp")
        link.send(json.dumps(reply).encode())


def _watch(program: int, link: socket.socket, limits: dict[str, Any]) -> dict[str, Any]:
    """Waits for the end of a program, and kills it when it is over its time or the worker says so."""
    handle = os.pidfd_open(program)
    clock = (~program << 3) | 2  # the CPU time of a process: CPUCLOCK_SCHED of its pid
    deadline, cause = time.monotonic() + limits["wall_s"], "ended"
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(link, select.POLLIN)
    while cause == "ended":
        ready = {descriptor for descriptor, _ in poll.poll(1000 * PAUSE_S)}
        if handle in ready:
            break
        if link.fileno() in ready:  # a message to stop, or the end of the worker
            link.recv(4096)
            cause = "stopped"
        elif time.clock_gettime(clock) > limits["cpu_s"]:
            cause = "cpu"
        elif time.monotonic() > deadline:
            cause = "wall"
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    os.close(handle)
    code = os.waitstatus_to_exitcode(status)
    return {"cause": "cpu" if cause == "ended" and code == -signal.SIGXCPU else cause, "code": code}


def _sweep() -> None:
    """Ends whatever is left in the PID namespace of the keeper."""
    assert os.getpid() == 1, "outside of a PID namespace of its own, this would end the processes of the host"
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _shut_in(descriptors: list[int], limits: dict[str, Any], walls: Walls) -> None:
    """In a forked child of the keeper: takes everything away, and then runs the program. Does not return."""
    try:
        task, *streams = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        with open(task, closefd=False) as file:
            told = json.load(file)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if walls.alone:
            os.chdir("/tmp")
        _limit(limits, walls)
        if walls.user is None:
            _drop_capabilities()
        else:
            _become_user(walls.user)
        if not walls.alone:
            _end_with_parent()  # after the change of user, which would undo it
        _filter["apply"](_libc, walls.filter)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(99)
    _run["run"](told, walls.names)
    os._exit(98)


def _limit(limits: dict[str, Any], walls: Walls) -> None:
    kinds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: math.ceil(limits["cpu_s"]) + 1,  # should the keeper not get to look
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: FOLDER_BYTES,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
    }
    if walls.alone or walls.user is not None:  # counted by user id: without one of its own, all of the user's count
        kinds[resource.RLIMIT_NPROC] = TASKS
    for kind, most in kinds.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


# --- the walls --------------------------------------------------------------------------------------------------------


def _leave_host(root: bool) -> None:
    flags = _PID | _NETWORK | _MOUNTS | _IPC | _UTS
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(flags | (0 if root else _USER)), "unshare")
    if not root:
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(line)


def _build_root() -> None:
    """Makes a root of the folders that Python needs, read-only, and leaves the one of the host."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in [*_folders(), *_DEVICES]}
    _mount("room", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=0755")
    for path, source in sources.items():
        target = f"/tmp{path}"
        if path in _DEVICES:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            _mount(f"/proc/self/fd/{source}", target, None, _BIND)
        else:
            os.makedirs(target, exist_ok=True)
            _mount(f"/proc/self/fd/{source}", target, None, _BIND)
            kept = os.statvfs(target).f_flag & _NO_EXEC  # a user namespace may not take a flag away
            _mount("none", target, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | kept)
        os.close(source)
    os.mkdir("/tmp/tmp")
    os.chdir("/tmp")
    number = _PIVOT_ROOT.get(os.uname().machine, -1)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount the root of the host")
    os.chdir("/")
    _mount("none", "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)


def _folders() -> list[str]:
    """The standard library, and the folders of the shared libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line and line.count("/")}
    found = {_run["STANDARD_LIBRARY"], *(os.path.dirname(file) for file in files if file.startswith("/"))}
    folders = sorted(path for path in found if os.path.isdir(path))
    return [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _free_user() -> int:
    """A user id that no other worker has, among those that this process may take."""
    with open("/proc/self/uid_map") as file:
        first, _, count = map(int, file.readline().split())
    top = min(first + count, 2_000_000_000)
    return top - 10 - os.getpid() % max(1, min(4_000_000, (top - first) // 2))


def _become_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _drop_capabilities() -> None:
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(ctypes.c_long(_CAPSET.get(os.uname().machine, -1)), header, nothing), "capset")


def _end_with_parent() -> None:
    _check(_libc.prctl(_PARENT_DEATH, int(signal.SIGKILL), 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
