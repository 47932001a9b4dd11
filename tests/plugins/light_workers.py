"""Workers of an engine's child process that need no model, and so start quickly: one takes its time, some end badly."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any


class Sleeper:
    def generate(self, *, progress: Callable[[int, int], None], should_stop: Callable[[], bool]) -> None:
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

    def generate(self, **request: Any) -> None:
        raise IndexError("list index out of range")


class Dying(Failing):
    """Ends in the middle of every rollout, with a last word."""

    def generate(self, **request: Any) -> None:
        print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
        os._exit(134)
