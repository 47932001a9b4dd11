"""``time_limit``: ends code that runs too long, in the thread that runs it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlow(BaseException):
    """Raised from outside in a thread whose time is up; not an ``Exception``, which what it runs may catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context manager that ends Python code inside of it after so many seconds.

    Raises:
        TooSlow: the time is up.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TooSlow))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:  # where the interruption may still arrive
        with lock:
            over = True
        timer.cancel()
