"""Runs one program in a process that ``program_isolation.py`` has isolated.

Nothing here is a secret or a judge: the program may change every name of this process. What leaves it are bytes on
standard output, and the values of the calls, one line of JSON each, on descriptor `RESULTS`. What they should be is
known in the parent of the worker alone.
"""

from __future__ import annotations

import atexit
import collections
import collections.abc
import datetime
import decimal
import fractions
import gc
import importlib.machinery
import io
import itertools
import json
import os
import random
import signal
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

RESULTS = 3
STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib"))
"""Without the packages of this environment: programs have the standard library alone."""
PRELUDE = """
import array, base64, binascii, bisect, calendar, cmath, collections, collections.abc, contextlib, copy, csv, datetime
import dataclasses, decimal, difflib, enum, fractions, functools, hashlib, heapq, inspect, io, itertools, json, math
import numbers, operator, os, queue, random, re, statistics, string, struct, sys, textwrap, threading, time, traceback
import types, typing, unicodedata, warnings, zlib
"""
"""Modules that programs find loaded, where nothing can be opened any more: all that they can import."""
NAMES = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, statistics
import string, sys
from typing import *
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from builtins import *
"""
"""Names that solutions to LiveCodeBench and LeetCode take for granted, such as ``List`` and ``inf``."""

_former: list[Any] = []
"""The streams of the worker: freed, they would write what they hold among the output of the program."""


def prepare() -> dict[str, Any]:
    """Imports what programs may use, before any is there; returns the names that they find defined."""
    names: dict[str, Any] = {}
    exec(PRELUDE, {})
    exec(NAMES, names)
    del names["__builtins__"]
    "\N{DIGIT ONE}".encode("idna")  # codecs that are loaded late
    gc.collect()
    gc.freeze()  # or every fork would copy the pages of all objects when it collects
    return names


def run(task: dict[str, Any], names: dict[str, Any]) -> None:
    """Runs ``task["program"]``, then its ``steps``, if it has any; ends the process."""
    handlers: list[Callable[[], Any]] = []
    _make_new(handlers)
    calls = task["steps"] is not None
    module = types.ModuleType("solution" if calls else "__main__")
    module.__dict__.update(names, __file__="/tmp/program.py")  # in its folder; the file itself is nowhere
    sys.modules[module.__name__] = module
    code = 0
    try:
        exec(compile(task["program"], "program.py", "exec", dont_inherit=True), module.__dict__)
        if calls:
            answer(task["steps"], module.__dict__)
            leave(0)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        _tell(error)
        code = 1
    try:
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        for handler in reversed(handlers):
            handler()
    except BaseException as error:
        _tell(error)
        code = 1
    leave(code)


def leave(code: int) -> None:
    """Ends the process as it is, with what was printed so far."""
    try:
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    os._exit(code & 0xFF)


def answer(steps: list[dict[str, Any]], names: dict[str, Any]) -> None:
    """Runs the steps one after another and writes what comes out of each that asks for a value."""
    target: Any = None
    for step in steps:
        try:
            if "exec" in step:
                exec(step["exec"], names)
                continue
            if "eval" in step:
                value = eval(step["eval"], names)
            else:
                if target is None:
                    target = names["Solution"]() if "Solution" in names else types.SimpleNamespace(**names)
                value = getattr(target, step["call"])(*step["arguments"])
            line = json.dumps({"value": plain(value)})
        except BaseException as error:
            if "exec" in step:
                continue  # what needs it fails by itself
            line = json.dumps({"error": _described(error)})
        rest = line.encode() + b"\n"
        while rest:
            rest = rest[os.write(RESULTS, rest) :]


def plain(value: Any) -> Any:
    """A value as JSON; what JSON has no form for is an object with one key that says what it is. A member of a subclass
    is what Python's own class takes it for, so that an ``__eq__`` of the program says nothing."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    for base, written in _WRITTEN.items():
        if isinstance(value, base):
            return written(value)
    try:
        items = _list(itertools.islice(iter(value), MOST_ITEMS))
    except Exception:  # no iterable, or an item that cannot be written
        return {"other": [kind.__name__]}
    return {"other": [kind.__name__, items]}


def _pairs(mapping: Any) -> list[list[Any]]:
    return [[plain(key), plain(item)] for key, item in mapping]


def _list(values: Any) -> list[Any]:
    return [plain(item) for item in values]


MOST_ITEMS = 10_000
"""Most items of an iterator that are read: some are endless."""
_WRITTEN: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    float: float.__float__,
    bool: bool,
    int: int.__index__,
    list: _list,
    collections.UserList: _list,
    tuple: lambda value: {"tuple": _list(value)},
    (dict, collections.UserDict, types.MappingProxyType): lambda value: {"dict": _pairs(value.items())},
    (set, frozenset): lambda value: {"set": _list(value)},
    (bytes, bytearray, memoryview): lambda value: {"bytes": bytes(value).hex()},
    collections.deque: lambda value: {"deque": _list(value)},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    collections.abc.KeysView: lambda value: {"keys": _list(value)},
    collections.abc.ItemsView: lambda value: {"items": _pairs(value)},
    collections.abc.ValuesView: lambda value: {"values": _list(value)},
    collections.abc.Iterator: lambda value: {"iterator": _list(itertools.islice(value, MOST_ITEMS))},
    fractions.Fraction: lambda value: {"fraction": [value.numerator, value.denominator]},
    decimal.Decimal: lambda value: {"decimal": decimal.Decimal.__str__(value)},
    complex: lambda value: {"complex": [value.real, value.imag]},
    datetime.datetime: lambda value: {"datetime": value.isoformat()},
    datetime.date: lambda value: {"date": value.isoformat()},
    datetime.time: lambda value: {"time": value.isoformat()},
    datetime.timedelta: lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]},
}
"""Class -> how its members are written, the first that fits."""


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _tell(error: BaseException) -> None:
    try:
        traceback.print_exception(error)
    except BaseException:  # the error's own text may fail
        os.write(2, b"error\n")


def _make_new(handlers: list[Callable[[], Any]]) -> None:
    """Gives this process the state of a new interpreter, which a fork does not have."""

    def register(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[..., Any]:
        handlers.append(lambda: function(*arguments, **named))
        return function

    atexit.register = register  # type: ignore[assignment]  # the handlers of this process belong to the worker; only those of the program run
    os.environ.clear()
    os.environb.clear()
    sys.argv = sys.orig_argv = ["program.py"]  # the worker's own names its parent and a descriptor
    sys.path[:] = [STANDARD_LIBRARY, os.path.join(STANDARD_LIBRARY, "lib-dynload")]
    sys.path_importer_cache.clear()
    for module in [module for module in sys.modules if module.partition(".")[0] == "grpo_pl"]:
        del sys.modules[module]
    own = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, importlib.machinery.PathFinder)
    sys.meta_path[:] = own
    sys.dont_write_bytecode = True
    random.seed(0)  # the same program has the same reward
    for number in (signal.SIGINT, signal.SIGPROF, signal.SIGVTALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _former.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace", line_buffering=True)  # type: ignore[misc]


def _stream(descriptor: int, mode: str, errors: str, *, line_buffering: bool = False) -> io.TextIOWrapper:
    file: Any = os.fdopen(descriptor, f"{mode}b", closefd=False)
    return io.TextIOWrapper(file, encoding="utf-8", errors=errors, line_buffering=line_buffering)
