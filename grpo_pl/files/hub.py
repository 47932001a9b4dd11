"""Whether the hub of Hugging Face can be reached."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from functools import cache
from urllib.parse import urlsplit

_CONNECT_S = 3.0  # to the hub, once


@cache
def offline_without_network() -> bool:
    """True if the libraries of Hugging Face are offline; they are made so where the hub's name cannot be looked up, or
    the hub takes no connection within ``_CONNECT_S``, for they would try for a minute. Behind a proxy, which does both
    itself, nothing is changed."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or "https" in urllib.request.getproxies():
        return bool(constants.HF_HUB_OFFLINE)
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), _CONNECT_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that start later, and for what is imported later
        constants.HF_HUB_OFFLINE = True
        if "datasets.config" in sys.modules:
            sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return True
    return False
