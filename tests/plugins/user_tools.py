"""Tools and a TRL environment as users write them."""

import asyncio
import json
import random
import time
from typing import Any


def call(name: str, **arguments: Any) -> str:
    """A call in the form of Hermes."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def echo(text: str) -> str:
    """Says the same.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0)
    return text


def misbehave(how: str) -> str:
    """Does something else.

    Args:
        how: raise, spin, hang, hoard, long, exit, draw or print.
    """
    if how == "raise":
        raise RuntimeError("no such luck")
    if how == "spin":
        while True:
            pass
    if how == "hang":
        time.sleep(3600)
    if how == "hoard":
        return "x" * 2**34
    if how == "long":
        return "y" * 10_000
    if how == "exit":
        raise SystemExit(2)
    if how == "draw":
        return str(random.SystemRandom().random())
    print("noise")
    return "printed"


def undocumented(a, b=1):  # type: ignore[no-untyped-def]
    return a


class Counter:
    """What TRL's ``environment_factory`` makes."""

    def __init__(self) -> None:
        self.value = 0

    def reset(self, start: int = 0, **kwargs: Any) -> str | None:
        self.value, self.row = start, kwargs
        return f"The counter stands at {start}."

    def increment(self, step: int) -> int:
        """Raises the counter.

        Args:
            step: By how much.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        self.value += step
        return self.value

    async def wait(self) -> str:
        """Waits for a moment."""
        await asyncio.sleep(0)
        return "waited"

    def _hidden(self) -> None:
        time.sleep(0)

    async def get_reward(self) -> float:
        return 1.0 if self.value == 5 else 0.0


class Silent:
    """The least that TRL asks for: no row, no first observation, no reward."""

    def reset(self) -> None:
        pass

    def nothing(self) -> str:
        """Does nothing."""
        return ""


class NoTools:
    """Nothing to call."""

    def reset(self) -> None:
        pass
