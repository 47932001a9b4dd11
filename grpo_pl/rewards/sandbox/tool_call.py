"""Calls a tool inside a sandbox worker: a function, found by its reference, with arguments that the policy wrote.

A job is the reference of a function and a JSON object with its ``arguments``, the ``sys.path`` as ``path``, and the
``longest`` result in characters. The verdict is ``ok`` with the result as text, or ``wrong`` with the exception.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys

from grpo_pl.processes.modules import load_name

_function = functools.cache(load_name)


def judge(reference: str, job: str, relative_tolerance: float) -> tuple[str, str]:
    call = json.loads(job)
    sys.path[:] = call["path"]
    try:
        result = _function(reference)(**call["arguments"])
        text = str(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except (Exception, SystemExit) as error:  # a tool may raise anything; the policy gets the message
        return "wrong", f"{type(error).__name__}: {error}"[: call["longest"]]
    longest = call["longest"]
    return "ok", text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"
