"""``ChildProcess``: a Python process that runs a function of ours, with a channel to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from grpo_pl.processes.channel import Channel, MessageTooLong
from grpo_pl.processes.resource_limits import OVER_MEMORY

ENTRY = Path(__file__).with_name("entry.py")
START_LIMIT_S = 180.0
"""Seconds in which a process must begin: importing SymPy takes half a second, more on a busy machine."""
_LAST_LINES, _LAST_BYTES = 12, 8192
_LONGEST_REPORT = 1 << 20
_POLL_S = 0.005
_STATUS_CAN_BE_LEFT = hasattr(os, "waitid")
"""macOS has that from Python 3.13 on. Before, the group of a child is killed when its status was taken already."""


class ChildStartError(RuntimeError):
    """A child process ended at its start, or did not begin in time."""


class ChildProcess:
    """A Python process in a session of its own; it ends with this one, or as soon as this object is gone, and takes
    with it what it has started, unless that began a session or a group.

    Args:
        function: ``module:name``, called there with the channel, the id of this process, and ``arguments``.
        environment: all variables that it has.
        descriptors: of this process, which it inherits.
        keep_output: whether `death` quotes what it printed last; otherwise nobody reads it.
        python: the interpreter; by default that of this process.
        patience_s: seconds that it gets to end by itself when the channel closes; with 0 it is killed.

    Raises:
        OSError: the machine refuses another process.
    """

    def __init__(
        self,
        function: str,
        *arguments: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        keep_output: bool = False,
        python: str = "",
        patience_s: float = 0.0,
    ) -> None:
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile() if keep_output else None  # noqa: SIM115 - closed with the process
        command = [function, str(theirs.fileno()), str(os.getpid()), *arguments]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P keeps the file's folder off sys.path, where a module could shadow one of a library
                    [python or sys.executable, "-P", str(ENTRY), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output or subprocess.DEVNULL,
                    stderr=output or subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *descriptors],
                    start_new_session=True,  # Ctrl-C on the terminal is for this process, which then ends the other
                )
        except BaseException:
            ours.close()
            raise
        self.channel = Channel(ours)
        self._output = output
        given = (os.getpid(), self._process, self.channel, output)
        self._finalizer = weakref.finalize(self, _end, *given, patience_s)

    def start(self, settings: bytes) -> str:
        """Sends the function its settings and returns what it answers: nothing when it is ready, or why it is not.

        Raises:
            ChildStartError: it ended, or did not answer within `START_LIMIT_S`; it is killed.
        """
        try:
            return self.channel.ask(settings, START_LIMIT_S, longest=_LONGEST_REPORT).decode(errors="replace")
        except TimeoutError:
            fault = f"did not start within {START_LIMIT_S:g} s"
        except MessageTooLong as error:
            fault = f"answered {error} at start"
        except (EOFError, OSError):
            fault = f"ended at start with {exit_name(self.exit_status(within_s=5.0))}"
        self.kill()
        self.close()
        raise ChildStartError(fault)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not _has_ended(self._process)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def kill(self) -> None:
        """Ends the process while another thread waits for a message of it."""
        _kill(self._process)

    def close(self) -> None:
        """Ends the process and waits for that. In a process that was forked from the one that started it, closes the
        copy of the channel only."""
        self._finalizer()

    def exit_status(self, within_s: float) -> int:
        """Waits for the end, and kills the process after so many seconds; negative for a signal."""
        return _ended(self._process, within_s)

    def death(self, within_s: float = 2.0) -> str:
        """The signal or exit status, and the last lines of output: the end of a sentence about the process."""
        how = exit_name(self.exit_status(within_s))
        if self._output is None:
            return f"ended by {how}"
        end = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, end - _LAST_BYTES))
        text = self._output.read().decode(errors="replace")
        lines = [f"\n  {line}" for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        said = "its last lines:" + "".join(lines) if lines else "it printed nothing"
        return f"ended by {how}; {said}"


def exit_name(status: int) -> str:
    """``SIGKILL`` or ``exit status 3``, from a status as in `subprocess`."""
    if status == OVER_MEMORY:
        return "too much memory"
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # one of the real-time signals, most of which have no name
        return f"signal {-status}"


def _end(
    owner: int, process: subprocess.Popen[bytes], channel: Channel, output: IO[bytes] | None, patience_s: float
) -> None:
    if os.getpid() == owner:
        with suppress(OSError):  # it is closed
            channel.socket.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may hold this end open
        _ended(process, patience_s)
    channel.close()
    if output is not None:
        output.close()


def _ended(process: subprocess.Popen[bytes], within_s: float) -> int:
    """The exit status, once it has ended by itself or was killed after so many seconds; what it has left is killed."""
    deadline = time.monotonic() + within_s
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _kill(process)
    return process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True once it has ended. The status is left for `_ended`: until it is taken, the group keeps its number."""
    if process.returncode is not None or not _STATUS_CAN_BE_LEFT:
        return process.poll() is not None
    return has_ended(process.pid)


def has_ended(pid: int) -> bool:
    """True once this child has ended. Its status is left to be waited for, where the system can do that."""
    try:
        if not _STATUS_CAN_BE_LEFT:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has taken the status, or the system did
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and those that it has started, which are in its group."""
    if process.returncode is None or not _STATUS_CAN_BE_LEFT:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
