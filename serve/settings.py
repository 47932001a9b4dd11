"""``ServeSettings``: what one server is started with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAX_SAMPLES = 64
"""Most completions of one prompt in one request."""
MAX_ITEMS = 1024
"""Most items of one score or evaluate request, and messages of a chat."""

MAX_COLUMNS = 64
"""Most further fields of the items of one request."""
MAX_TEXT = 1 << 20
"""Most characters of one completion or gold answer."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Checked before anything is loaded."""

    model: Path
    """Exported folder, run folder, or checkpoint file."""
    host: Literal["127.0.0.1", "0.0.0.0", "::"] = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` and ``::`` are reachable from other machines."""
    port: int = 8000
    """Port to listen on."""
    api_key: str | None = None
    """Bearer token that every route but ``/health`` asks for; None asks for none."""
    max_batch_size: int = 64
    """Most completions decoded at once."""
    max_queue: int = 128
    """Most requests that wait for a place; further ones are refused with 429."""
    deadline_s: float = 120.0
    """Seconds after which a request that is not finished is ended with 504."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1`` …; ``auto`` takes a GPU where there is one."""
    max_body_mb: int = 8
    """Largest request body in MiB."""

    def __post_init__(self) -> None:
        if self.host not in ("127.0.0.1", "0.0.0.0", "::"):
            raise ValueError(f"host must be 127.0.0.1, 0.0.0.0 or ::, got {self.host!r}.")
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"port must lie in 1024 … 65535, got {self.port}.")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.strip()):
            raise ValueError("the API key must be ASCII and not blank: it travels in an HTTP header.")
        for name in ("max_batch_size", "max_queue", "max_body_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ValueError(f"deadline must be a positive number of seconds, got {self.deadline_s}.")
