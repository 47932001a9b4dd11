"""The transitions that follow when a limit on the time or size of an environment is exceeded."""

from __future__ import annotations

from grpo_pl.environment import Environment, PoolLimits, Status, Transition, failed


def at_fault(prototype: Environment, method: str, status: Status, detail: str) -> Transition:
    """The transition of a failed ``reset``, ``step`` or ``finish``; a reset is never the policy's fault."""
    return failed(status, detail, blame="environment" if method == "reset" else prototype.blame)


def over_time(prototype: Environment, method: str, limits: PoolLimits) -> Transition:
    return at_fault(prototype, method, "timeout", f"{method} took longer than {limits.of(method):g} s")
