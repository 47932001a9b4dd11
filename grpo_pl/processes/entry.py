"""The first code of a child process, which `ChildProcess` starts by the path of this file.

It loads the package from where the parent has it, without a change of ``sys.path``, and calls the function that the
parent names. When the channel to the parent closes, the process ends.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path


def main(function: str, descriptor: str, parent: str, *arguments: str) -> None:
    """Calls ``function(channel, parent, *arguments)``; meanwhile the process ends as soon as its parent does.

    Args:
        function: ``module:name``.
        descriptor: of the socket to the parent.
        parent: its process id.
    """
    from grpo_pl.processes.channel import Channel, ChannelClosed
    from grpo_pl.processes.modules import load_name
    from grpo_pl.processes.resource_limits import end_with_parent

    end_with_parent(int(parent))  # before the import, which may take long
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        load_name(function)(channel, int(parent), *arguments)
    except ChannelClosed:
        os._exit(0)  # the parent is gone: nothing is saved, and exit handlers of libraries take time


def _load_package() -> None:
    """``import grpo_pl`` from the folder above this one: it may not be installed, or in another version."""
    folder = Path(__file__).resolve().parents[1]
    place = [str(folder)]
    spec = importlib.util.spec_from_file_location("grpo_pl", folder / "__init__.py", submodule_search_locations=place)
    assert spec is not None and spec.loader is not None
    module = sys.modules["grpo_pl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _load_package()
    main(*sys.argv[1:])
