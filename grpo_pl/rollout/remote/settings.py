"""Settings of an engine's server, and the token that it shares with its clients."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from socket import AI_PASSIVE, SOCK_STREAM, getaddrinfo

TOKEN = "GRPO_PL_ENGINE_TOKEN"
"""Environment variable with the token, on both sides."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and what it takes; checked before anything is started.

    Raises:
        ValueError: names the first setting that cannot be used.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    """0 takes a free one."""
    token: str | None = None
    """What every request but those to ``/health`` must bring; None only where no other machine can ask."""
    lease_s: float = 30.0
    """For so long a run that is not heard from keeps the engine."""
    weights_folder: Path | None = None
    """Where weights may be read from files; None for nowhere."""
    max_request_mb: int = 32
    """Largest body, in MiB, of a request that is no push; a tokenizer may have 128 in any case."""
    max_weights_gib: float = 64.0
    """Largest push."""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie in 1 … 65535, or be 0 for a free one, got {self.port}.")
        for name in ("lease_s", "max_request_mb", "max_weights_gib"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be positive, got {getattr(self, name)}.")
        if self.weights_folder is not None and not self.weights_folder.is_dir():
            raise ValueError(f"no such folder: {self.weights_folder} (weights-folder).")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"ssl-keyfile {self.ssl_keyfile} is of no use without --ssl-certfile.")
        for file in (self.ssl_certfile, self.ssl_keyfile):
            if file is not None and not file.is_file():
                raise ValueError(f"no such file: {file}.")
        if self.token is None and not self._is_local():
            raise ValueError(
                f"host {self.host} lets other machines in, and there is no token: set {TOKEN}, or give "
                "--token-file; openssl rand -hex 32 makes one."
            )

    def _is_local(self) -> bool:
        try:
            found = getaddrinfo(self.host or None, self.port, type=SOCK_STREAM, flags=AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"host {self.host!r} is no address of this machine: {error}.") from None
        return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


_SECRET = re.compile("(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)")


def forget_secrets() -> None:
    """Takes tokens, keys and passwords out of this process's environment, which its worker's process inherits."""
    for name in list(os.environ):
        if _SECRET.search(name.upper()):
            del os.environ[name]


def token_of(file: str | None) -> str | None:
    """The token in a file, else that of the environment.

    Raises:
        ValueError: no such file, or a token that cannot travel in a header.
    """
    given = os.environ.get(TOKEN) if file is None else Path(file).read_text(encoding="utf-8").strip()
    if given is None:
        return None
    if not given.isascii() or not given.isprintable() or len(given.split()) != 1 or len(given) < 16:
        raise ValueError(
            f"the engine's token ({file or TOKEN}) must be 16 or more ASCII characters without spaces: "
            "openssl rand -hex 32 makes one."
        )
    return given
