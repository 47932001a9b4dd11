"""The system calls that a program may make: a seccomp filter that allows what computing needs and refuses all else.

A refused call fails with EPERM, so that a program sees a ``PermissionError``. No list contains fork, exec, kill,
ptrace, socket, connect, mount, unshare or prctl.
"""

from __future__ import annotations

import ctypes
import platform
import struct

ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # reading and writing what is open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "close": (3, 57), "fstat": (5, 80),
    "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214),
    # signals to itself by timers and faults, threads, the end
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "pause": (34, None),
    "restart_syscall": (219, 128), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "membarrier": (324, 283), "set_tid_address": (218, 96), "exit": (60, 93), "exit_group": (231, 94),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    # time
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102),
    # who and where it is
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getpgrp": (111, None), "getcwd": (79, 17), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278),
}  # fmt: skip
"""Name -> number on x86-64 and on aarch64, None where there is none."""
FILES: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "symlink": (88, None), "symlinkat": (266, 36), "link": (86, None),
    "linkat": (265, 37), "ftruncate": (77, 46), "truncate": (76, 45), "fsync": (74, 82), "fdatasync": (75, 83),
    "pread64": (17, 67), "pwrite64": (18, 68), "chdir": (80, 49), "umask": (95, 166), "flock": (73, 32),
    "fadvise64": (221, 223), "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209),
}  # fmt: skip
"""Further calls that are allowed where the program has a file system of its own: files, and pairs of sockets."""
CLONE, CLONE3, FCNTL, IOCTL, PRLIMIT = (56, 220), (435, 435), (72, 25), (16, 29), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column of its numbers, and how the kernel names the architecture."""

_CLONE_THREAD = 0x10000
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicating and flags: F_SETOWN could send signals to other processes
_IOCTL_COMMANDS = (0x5421, 0x5451)  # FIONBIO, FIOCLEX
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _when(number: int | None, *steps: bytes) -> list[bytes]:
    """``steps``, which end in a verdict, for one system call; others pass over them."""
    return [] if number is None else [_step(_EQUAL, number, 0, len(steps)), *steps]


def machine() -> tuple[int, int]:
    """Column and name of the architecture.

    Raises:
        OSError: the numbers of its system calls are not known here.
    """
    if platform.machine() not in MACHINES:
        raise OSError(f"no filter of system calls for {platform.machine()}: only for {', '.join(MACHINES)}")
    return MACHINES[platform.machine()]


def instructions(*, files: bool) -> bytes:
    """The filter in the kernel's classic BPF; ``files`` allows `FILES` as well."""
    column, architecture = machine()
    allow, refuse = _step(_RETURN, _ALLOW), _step(_RETURN, _REFUSE)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if column == 0:  # the x32 calls have numbers of their own from here
        steps += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]
    for numbers in [*ALWAYS.values(), *(FILES.values() if files else ())]:
        steps += _when(numbers[column], allow)
    steps += _when(CLONE3[column], _step(_RETURN, _ABSENT))  # its flags lie in memory; the C library then takes clone
    steps += _when(CLONE[column], _step(_LOAD, _ARGUMENTS), _step(_ANY_BIT, _CLONE_THREAD, 0, 1), allow, refuse)
    steps += _when(PRLIMIT[column], _step(_LOAD, _ARGUMENTS), _step(_EQUAL, 0, 0, 1), allow, refuse)
    for numbers, commands in ((FCNTL, _FCNTL_COMMANDS), (IOCTL, _IOCTL_COMMANDS)):
        known = [_step(_EQUAL, command, len(commands) - i, 0) for i, command in enumerate(commands)]
        steps += _when(numbers[column], _step(_LOAD, _ARGUMENTS + 8), *known, refuse, allow)
    return b"".join([*steps, refuse])


class Program(ctypes.Structure):
    """The kernel's ``sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def compiled(*, files: bool) -> Program:
    """The filter as `apply` takes it, made once for many processes.

    Raises:
        OSError: the machine is not known.
    """
    code = instructions(files=files)
    return Program(len(code) // 8, code)


def apply(libc: ctypes.CDLL, program: Program) -> None:
    """Puts the filter on this process, and on threads that it starts, for good.

    Raises:
        OSError: the kernel has no such filters.
    """
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")
