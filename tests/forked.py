"""Processes that are forked from the one that tests: it has imported all that they would import for many seconds."""

import gc
import logging
import multiprocessing.util
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.spawn import spawn_main
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import pytest
import torch
import transformers.models.auto.modeling_auto
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import grpo_pl.extras.engines.native_child
import grpo_pl.processes.child_process
from grpo_pl.extras.engines.child import main as child
from grpo_pl.processes import entry
from tests.conftest import exit_status


class Forked:
    """``run()`` in a process of its own, to be treated as a `subprocess.Popen`; what it returns is the exit status.

    Args:
        output: descriptor for all that it prints; None leaves that where this one prints.
        passed: descriptors that it keeps.
        session: it begins one of its own.
    """

    def __init__(
        self,
        run: Callable[[], int],
        *,
        env: Mapping[str, str],
        output: int | None,
        passed: Sequence[int] = (),
        session: bool = True,
    ) -> None:
        self._lock = threading.Lock()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            if session:
                os.setsid()
            _run(run, env, output, passed)

    @property
    def returncode(self) -> int | None:
        return self._status

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if ended else None
            return self._status

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.002)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(run: Callable[[], int], env: Mapping[str, str], output: int | None, passed: Sequence[int]) -> NoReturn:
    """As a new process would: without the descriptors, handlers and modes of this one."""
    status = 1
    try:
        gc.freeze()
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in passed:
                with suppress(OSError):
                    os.close(descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.root.handlers.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        if env is not os.environ:
            os.environ.clear()
            os.environ.update(env)
        sys.path[:] = dict.fromkeys([*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path])
        tempfile.tempdir = None  # which is that of this environment
        vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            status = exit_status(run)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _engine_process(
    command: Sequence[str], *, env: Mapping[str, str], stdout: Any, pass_fds: Sequence[int], **options: Any
) -> Forked | subprocess.Popen[bytes]:
    """In the place of `subprocess.Popen`, for ``python -P …/entry.py grpo_pl.extras.engines.child.main:main …``."""
    begin = command.index(str(grpo_pl.processes.child_process.ENTRY)) + 1
    if command[begin] != f"{child.__name__}:main":
        return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)

    def run() -> int:
        entry.main(*command[begin:])
        return 0

    return Forked(run, env=env, output=stdout.fileno(), passed=pass_fds)


@contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, the engines' processes of this one, and of those that are forked from it, are forked."""
    library = SimpleNamespace(**{**vars(subprocess), "Popen": _engine_process})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_pl.processes.child_process, "subprocess", library)
        yield


def with_forked_workers(run: Callable[[], int]) -> int:
    """What ``run()`` returns, in a process in which those of multiprocessing's ``spawn`` are forked."""
    original = multiprocessing.util.spawnv_passfds

    def start(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        told = re.search(r"spawn_main\((.*)\)$", arguments[arguments.index("-c") + 1])
        if told is None:
            return original(path, arguments, passed)
        given = {name: int(value) for name, _, value in (part.partition("=") for part in told[1].split(", "))}

        def work() -> int:
            sys.argv = ["-c", "--multiprocessing-fork"]
            multiprocessing.util._run_after_forkers()  # connections to managers are those of the parent
            spawn_main(**given)
            return 0

        return Forked(work, env=os.environ, output=None, passed=passed, session=False).pid

    multiprocessing.util.spawnv_passfds = start
    return run()


def forked(
    run: Callable[[], int], *, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> tuple[Forked, IO[str]]:
    """``run()`` in a process of its own, and the stream of what it prints."""

    def there() -> int:
        if cwd is not None:
            os.chdir(cwd)
        return run()

    reading, writing = os.pipe()
    process = Forked(there, env=env, output=writing)
    os.close(writing)
    return process, os.fdopen(reading)


def run_script(name: str, *arguments: str, env: Mapping[str, str], cwd: Path) -> tuple[int, str]:
    """``python NAME ARGUMENTS`` in a folder: its exit status, and what it printed."""
    import grpo_pl.cli.trainer  # noqa: F401 - once, not in each script

    def run() -> int:
        sys.argv, sys.path[:0] = [name, *arguments], [str(cwd)]
        runpy.run_path(name, run_name="__main__")
        return 0

    process, output = forked(run, env=env, cwd=cwd)
    with output:
        said = output.read()
    return process.wait(), said
