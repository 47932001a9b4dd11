"""``ServeSettings``: the settings of one server, which are the command line's options, and fixed limits of requests."""

from __future__ import annotations

import math
import os
import re
import socket
import ssl
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

API_KEY = "GRPO_PL_API_KEY"
"""Environment variable with the server's key."""

MAX_SAMPLES = 64
"""Most completions of one prompt in one request."""
MAX_TOKENS = 1 << 17
"""Most characters of ``/tokenize``, most tokens of ``/detokenize``."""


_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_NAME = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9._-]+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of one server and the options of ``grpo-pl serve``; checked before anything is loaded."""

    model: Path | None = None
    """Exported folder, run folder, or checkpoint of a run."""
    follow: Path | None = None
    """Folder of a run in training, in place of a model: serve its newest checkpoint, and every newer one."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address or name to listen on: 127.0.0.1, or 0.0.0.0 and :: for other machines to reach it."""
    served_model_name: str | None = None
    """Name of the model for clients; by default the run's name, or the folder's."""
    api_key: str | None = None
    """Bearer token that every route but /health asks for; by default $GRPO_PL_API_KEY, and none without it."""
    weights_key: str | None = None
    """Removed: --follow a run, or start a server for other weights."""
    no_key: bool = False
    """Let other machines in without a key."""
    allowed_host: str = ""
    """Further names of the server that clients may use, separated by commas."""
    cors_origin: str = ""
    """Origins of web pages that may use the server, separated by commas: https://example.org."""
    ssl_certfile: Path | None = None
    """Certificate chain in PEM form, to serve https only."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate, if its file does not hold it."""
    http: Literal["auto", "h11"] = "auto"
    """uvicorn's HTTP parser; h11 for Java's default client, which offers HTTP/2, at a few percent of the speed."""
    access_log: bool = False
    """Removed: the access log of a proxy, see docs/serving.md."""
    max_batch_size: int = 64
    """Completions decoded at once."""
    max_queue: int = 128
    """Requests that may wait for a slot of the batch; further ones get 429."""
    deadline: float = 120.0
    """Seconds after which an unfinished request gets 504."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    max_body_mb: int | None = None
    """Largest request body in MiB; by default 8, or 16 for a model that reads images."""
    trust_rewards: bool = False
    """Let the model name any class as a reward, such as functions and judges: only if you know who wrote it. Without it
    such a model is refused."""

    def __post_init__(self) -> None:
        if self.model is None and self.follow is None:
            raise ValueError("--model is missing: give an export, a run folder or a checkpoint, or --follow a run.")
        if self.model is not None and self.follow is not None:
            raise ValueError("give --model or --follow, not both: --follow serves the checkpoints of its run.")
        if self.weights_key is not None:
            raise ValueError("weights_key is gone: --follow RUN takes each newer checkpoint; else start a server anew.")
        if self.access_log:
            raise ValueError("access_log is gone: let the proxy in front write it, see docs/serving.md.")
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(API_KEY))  # no default, which --help would print
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie in 1 … 65535, or be 0 for a free one, got {self.port}.")
        for name in ("max_batch_size", "max_queue", "max_body_mb"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise ValueError(f"deadline must be a positive number of seconds, got {self.deadline}.")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("served_model_name is blank: give a name, or leave it out.")
        for host in self.allowed_hosts:
            if not _NAME.fullmatch(host):
                raise ValueError(f"allowed_host {host!r} is no host name: give it without scheme, port and path.")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origin {origin!r} is no origin: give one like https://example.org.")
        self._check_key()
        self._check_tls()

    @property
    def allowed_hosts(self) -> list[str]:
        return _parts(self.allowed_host)

    @property
    def cors_origins(self) -> list[str]:
        return [origin.rstrip("/").lower() for origin in _parts(self.cors_origin)]

    @cached_property
    def addresses(self) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
        """The addresses that ``host`` stands for, as ``socket.bind`` takes them."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"host {self.host!r} is no address of this machine: {error}.") from None
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]

    def _check_key(self) -> None:
        if not self.host:
            raise ValueError("host is empty: give 127.0.0.1, or 0.0.0.0 for all addresses.")
        key = self.api_key
        if key is not None and (not key.isascii() or not key.strip() or key != key.strip()):
            raise ValueError(
                "the API key must be ASCII, not blank, and without spaces around it, because it travels in an HTTP "
                f"header; for a server without one, unset {API_KEY}."
            )
        if self.api_key is not None:
            if self.no_key:
                raise ValueError("--no-key and a key are both given: leave one of them out.")
            return
        found = [ip_address(address[0].partition("%")[0]) for _, address in self.addresses]
        is_local = all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in found)
        if not is_local and not self.no_key:
            raise ValueError(
                f"host {self.host} lets other machines in, and there is no key: set GRPO_PL_API_KEY, or say --no-key "
                "if everyone who can reach this machine may use the server."
            )

    def _check_tls(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"ssl_keyfile {self.ssl_keyfile} is of no use without --ssl-certfile.")
        for name, file in {"--ssl-certfile": self.ssl_certfile, "--ssl-keyfile": self.ssl_keyfile}.items():
            if file is not None and not file.is_file():
                raise ValueError(f"{name}: no such file: {file}.")
        if self.ssl_certfile is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"no certificate with its key in {self.ssl_certfile}: {error}.") from None


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
