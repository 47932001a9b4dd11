"""The servers that other people's clients ask: ``python -m tests.serve.clients.servers`` starts them, says in one line
where they are, which is what `conftest.py` here wants as ``$GRPO_PL_SERVERS``, and ends them when its input does."""

import json
import sys
import tempfile
from pathlib import Path

from tests.serve.conftest import Running, write_export

KEY = "secret-clients"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = write_export(folder)

        def start(kind: str, *options: str, interpreter: tuple[str, ...] = ()) -> Running:
            (folder / kind).mkdir()
            return Running(export, folder / kind / "log", *options, api_key=KEY, interpreter=interpreter)

        servers = {
            "server": start("server", interpreter=("-u",)),  # as users start it; the others in forks, which is quick
            "narrow": start("narrow", "--max-batch-size", "2", "--max-queue", "1"),
            "h11": start("h11", "--http", "h11"),
        }
        try:
            print(json.dumps({"key": KEY} | {kind: server.address for kind, server in servers.items()}), flush=True)
            sys.stdin.read()
        finally:
            for server in servers.values():
                server.ask_to_stop()
            for server in servers.values():
                server.stop()


if __name__ == "__main__":
    main()
