"""The Hugging Face hub where there is no network: cached copies at once, instead of a minute of retries."""

from __future__ import annotations

import functools
import socket
from urllib.parse import urlsplit


@functools.cache
def prefer_cache_without_network() -> bool:
    """Whether the hub cannot be reached; if so, its libraries are told to look into their caches only.

    One look-up of the hub's address stands for the network. Without this, ``transformers`` asks six times for each
    file of a model before it takes the cached one. ``HF_HUB_OFFLINE=1`` has the same effect from outside.
    """
    import datasets.config
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _has_address(urlsplit(constants.ENDPOINT).hostname or ""):
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
    return bool(constants.HF_HUB_OFFLINE)


def _has_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
