"""Isolates programs: a supervisor process that starts each program in a process of its own, at one of two levels.

``namespaces``: a PID, network, mount, IPC and UTS namespace (and a user namespace where the worker is not root), a file
system that holds the standard library, read-only, and an empty folder of limited size, plus the filter. ``filter``: the
filter of ``program_filter.py`` alone, by which nothing can be opened, no process started and none signalled. In both, a
worker that is root gives each of its programs a user id that nobody else has.

The supervisor is forked from a sandbox worker. It never holds a program, its input or its output: it gets descriptors
and hands them on, so that a program finds nothing of another in the memory that it was forked with.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NamedTuple

from grpo_pl.extras.code import program_filter, program_run
from grpo_pl.processes.resource_limits import kill_with_parent, set_limit

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
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_libc = ctypes.CDLL(None, use_errno=True)


class Isolation(NamedTuple):
    """The means by which a supervisor isolates its programs."""

    in_namespaces: bool
    """The supervisor has namespaces of its own."""
    user: int | None
    """The user id that its programs get; None keeps that of the worker, which then is not root."""
    filter: program_filter.Program
    names: dict[str, Any]
    """Names that programs find defined."""


class IsolationUnavailable(Exception):
    """This machine cannot isolate programs at this level; the message says which step failed."""


def start_supervisor(level: str, names: dict[str, Any]) -> socket.socket:
    """Starts a supervisor and returns the socket to it. It takes messages of limits as JSON with five descriptors: the
    task, standard input, output and errors, and one for results; it answers with how the program ended.

    Args:
        level: one of `LEVELS`.
        names: what ``program_run.prepare`` returned.

    Raises:
        IsolationUnavailable: this machine does not allow it.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root, user = os.geteuid() == 0, _free_user()
    child = os.fork()
    if child == 0:
        try:
            here.close()
            _become_supervisor(level, there, root, user, names)
        except BaseException as error:
            there.send(json.dumps({"fault": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)
    there.close()
    reply = json.loads(here.recv(4096) or b'{"fault": "its process ended"}')
    if "fault" in reply:
        here.close()
        os.waitpid(child, 0)
        raise IsolationUnavailable(reply["fault"])
    return here


def _become_supervisor(level: str, worker: socket.socket, root: bool, user: int, names: dict[str, Any]) -> None:
    """In a forked child of the worker: becomes the supervisor, or the process that waits for it."""
    kill_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, worker.fileno())
    os.closerange(worker.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    in_namespaces = level == "namespaces"
    if in_namespaces:
        _leave_host(root)
        inner = os.fork()  # the first process in the new PID namespace: when it ends, the kernel ends all in there
        if inner:
            worker.close()
            os.waitpid(inner, 0)
            os._exit(0)
        kill_with_parent()
        _build_root()
    seccomp = program_filter.compiled(files=in_namespaces)
    worker.send(b"{}")
    _supervise(worker, Isolation(in_namespaces, user if root else None, seccomp, names))


def _supervise(worker: socket.socket, isolation: Isolation) -> None:
    """Runs one program after another, until the worker closes the socket."""
    owner = "" if isolation.user is None else f",uid={isolation.user},gid={isolation.user}"
    while True:
        message, descriptors, _, _ = socket.recv_fds(worker, 4096, 5)
        if not message:
            os._exit(0)
        limits = json.loads(message)
        if isolation.in_namespaces:
            options = f"size={FOLDER_BYTES},nr_inodes={FOLDER_FILES},mode=0700{owner}"
            _mount("folder", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, options)
        program = os.fork()
        if program == 0:
            _isolate(descriptors, limits, isolation)
        for descriptor in descriptors:
            os.close(descriptor)
        reply = _watch(program, worker, limits)
        if isolation.in_namespaces:
            _sweep()
            _check(_libc.umount2(b"/tmp", _DETACH), "umount /tmp")
        worker.send(json.dumps(reply).encode())


def _watch(program: int, worker: socket.socket, limits: dict[str, Any]) -> dict[str, Any]:
    """Waits for the end of a program, and kills it when it is over its time or the worker says so."""
    handle = os.pidfd_open(program)
    clock = (~program << 3) | 2  # the CPU time of a process: CPUCLOCK_SCHED of its pid
    deadline, cause = time.monotonic() + limits["wall_s"], "ended"
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(worker, select.POLLIN)
    while cause == "ended":
        ready = {descriptor for descriptor, _ in poll.poll(1000 * PAUSE_S)}
        if handle in ready:
            break
        if worker.fileno() in ready:  # a message to stop, or the end of the worker
            worker.recv(4096)
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
    """Ends whatever is left in the PID namespace of the supervisor."""
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


def _isolate(descriptors: list[int], limits: dict[str, Any], isolation: Isolation) -> None:
    """In a forked child of the supervisor: takes everything away, and then runs the program. Does not return."""
    try:
        task_file, *streams = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        with open(task_file, closefd=False) as file:
            task = json.load(file)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if isolation.in_namespaces:
            os.chdir("/tmp")
        _limit(limits, isolation)
        if isolation.user is None:
            _drop_capabilities()
        else:
            os.setgroups([])
            os.setresgid(isolation.user, isolation.user, isolation.user)
            os.setresuid(isolation.user, isolation.user, isolation.user)
        if not isolation.in_namespaces:
            kill_with_parent()  # after the change of user, which would undo it
        program_filter.apply(_libc, isolation.filter)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(99)
    program_run.run(task, isolation.names)
    os._exit(98)


def _limit(limits: dict[str, Any], isolation: Isolation) -> None:
    kinds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: math.ceil(limits["cpu_s"]) + 1,  # should the supervisor not get to look
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: FOLDER_BYTES,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
    }
    # counted by user id: without one of its own, all of the user's count
    if isolation.in_namespaces or isolation.user is not None:
        kinds[resource.RLIMIT_NPROC] = TASKS
    for kind, most in kinds.items():
        set_limit(kind, most, for_good=True)


# --- namespaces, users and capabilities -------------------------------------------------------------------------------


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
    _mount("root", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=0755")
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
    os.symlink("/tmp", "/tmp/dev/shm")  # the program's folder, where locks of multiprocessing, as of thread pools, lie
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
    found = {program_run.STANDARD_LIBRARY, *(os.path.dirname(file) for file in files if file.startswith("/"))}
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


def _drop_capabilities() -> None:
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(ctypes.c_long(_CAPSET.get(os.uname().machine, -1)), header, nothing), "capset")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
