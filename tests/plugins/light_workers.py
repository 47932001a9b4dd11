"""Workers of an engine's child process that need no model, and so start quickly: one takes its time, some end badly."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any


class Sleeper:
    def generate(self, request: Any, *, progress: Callable[[int, int], None], should_stop: Callable[[], bool]) -> None:
        for second in range(300):
            progress(second, 0)
            time.sleep(1.0)


class Refusing:
    """Has no kernel for anything."""

    def __init__(self, **settings: Any) -> None:
        raise ValueError("there is no kernel for heads of 16")


class Failing:
    """Makes a mistake in every rollout, and lives on."""

    def __init__(self, **settings: Any) -> None:
        pass

    def load(self, weights: Iterable[Any]) -> None:
        pass  # reads none of them

    def generate(self, request: Any, **told: Any) -> None:
        raise IndexError("list index out of range")


class Starting:
    """Is never ready."""

    def __init__(self, **settings: Any) -> None:
        time.sleep(300)


class Loading(Failing):
    """Takes its weights, and for ever."""

    def load(self, weights: Iterable[Any]) -> None:
        list(weights)
        time.sleep(300)


class Deaf(Failing):
    """Draws without end, and never asks whether to stop."""

    def generate(self, request: Any, **told: Any) -> None:
        time.sleep(300)


class Cut(Failing):
    """Can read none of the weights that it is handed."""

    def load(self, weights: Iterable[Any]) -> None:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "grpo_pl-weights" in os.readlink(f"/proc/self/fd/{number}"):  # the memory that they come by
                    os.close(int(number))
        list(weights)


class Survived(Failing):
    """Dies while a process that was forked from it goes on and keeps all that it had open."""

    def generate(self, request: Any, **told: Any) -> None:
        if (helper := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        print(f"helper {helper}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(Failing):
    """Ends in the middle of every rollout, with a last word."""

    def generate(self, request: Any, **told: Any) -> None:
        print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
        os._exit(134)


class Stuck(Failing):
    """Comes to no end in one of its calls."""

    def __init__(self, *, where: str, **settings: Any) -> None:
        self.where = where
        self._pause("start")

    def load(self, weights: Iterable[Any]) -> None:
        list(weights)
        self._pause("load")

    def generate(self, request: Any, **told: Any) -> None:
        self._pause("generate")

    def _pause(self, where: str) -> None:
        if self.where == where:
            time.sleep(300)
