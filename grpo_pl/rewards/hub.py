"""Without a network, names of the hub are looked for among cached copies at once."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from functools import cache
from urllib.parse import urlsplit


@cache
def offline_without_network() -> bool:
    """Whether the libraries of Hugging Face are offline; they are made so where the hub's name cannot be looked up, for
    they would try for a minute. Behind a proxy, which looks names up itself, nothing is changed."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or "https" in urllib.request.getproxies():
        return bool(constants.HF_HUB_OFFLINE)
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except socket.gaierror:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that start later, and for what is imported later
        constants.HF_HUB_OFFLINE = True
        if "datasets.config" in sys.modules:
            sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return True
    return False
