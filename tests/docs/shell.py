"""A ``grpo-pl`` for shells that forks the process of the tests instead of starting another, which imports for 7 s."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpo_pl.cli.trainer  # noqa: F401 - once, not in each command
from grpo_pl.cli.main import main
from tests.forked import Forked

COMMAND = """#!/bin/sh
mine=$(mktemp -d "$(dirname "$0")/call.XXXXXX")
mkfifo "$mine/output" "$mine/status"
pwd > "$mine/cwd"
env -0 > "$mine/env"
printf '%s\\0' "$@" > "$mine/arguments"
echo "$mine" > "$(dirname "$0")/asked"
cat "$mine/output"
exit "$(cat "$mine/status")"
"""


@contextmanager
def forked_commands(folder: Path) -> Iterator[str]:
    """A folder for the front of ``PATH``."""
    (folder / "grpo-pl").write_text(COMMAND)
    (folder / "grpo-pl").chmod(0o755)
    os.mkfifo(folder / "asked")
    answering = threading.Thread(target=_answer, args=(folder / "asked",), daemon=True)
    answering.start()
    with (folder / "asked").open("w") as asked:
        yield str(folder)
        asked.write("\n")
    answering.join()


def _answer(asked: Path) -> None:
    with asked.open() as lines:
        while line := lines.readline().strip():
            call = Path(line)
            given = (call / "arguments").read_text().split("\0")[:-1]
            pairs = (pair.partition("=") for pair in (call / "env").read_text().split("\0")[:-1])
            output = os.open(call / "output", os.O_WRONLY)
            process = Forked(
                partial(_command, Path((call / "cwd").read_text().rstrip("\n")), given),
                env={name: value for name, _, value in pairs},
                output=output,
            )
            os.close(output)
            (call / "status").write_text(str(process.wait()))


def _command(folder: Path, given: list[str]) -> int:
    os.chdir(folder)
    return main(given)
