"""Limits on the time and size of environments, and the transitions that follow when one is exceeded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo_pl.environments.base import Environment, Status, Transition, failed
from grpo_pl.functional.argument_checks import check_positive


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Limits of the episodes of a pool."""

    step_timeout_s: float = 30.0
    """Seconds of the clock that a step may take."""
    reset_timeout_s: float = 60.0
    """Seconds that the start of an episode may take, that of its process included."""
    max_observation_chars: int = 32_768
    """Longest observation; a longer one ends its episode."""
    memory_limit_mb: int = 2048
    """Address space that the process of an episode may add to what it begins with (``RLIMIT_AS``)."""
    threads: int = 8
    """Steps that run at the same time where episodes share this process."""

    def __post_init__(self) -> None:
        check_positive(**{field.name: getattr(self, field.name) for field in fields(PoolLimits)})

    def of(self, method: str) -> float:
        """Seconds that ``reset`` or ``step`` may take."""
        return self.reset_timeout_s if method == "reset" else self.step_timeout_s


def at_fault(prototype: Environment, method: str, status: Status, detail: str) -> Transition:
    """The transition of a failed ``reset``, ``step`` or ``finish``; a reset is never the policy's fault."""
    return failed(status, detail, blame="environment" if method == "reset" else prototype.blame)


def over_time(prototype: Environment, method: str, limits: PoolLimits) -> Transition:
    return at_fault(prototype, method, "timeout", f"{method} took longer than {limits.of(method):g} s")
