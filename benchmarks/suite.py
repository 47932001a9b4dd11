"""Measures the minutes of a suite of tests, and which of its files take them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import parser_of, publish, surroundings

ROOT = Path(__file__).resolve().parents[1]
_DURATION = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S+?)::")
_OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


def seconds_by_file(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of all tests of a file, from the lines of ``pytest --durations=0``."""
    found: dict[str, float] = {}
    for line in lines:
        if duration := _DURATION.match(line):
            found[duration[2]] = found.get(duration[2], 0.0) + float(duration[1])
    return found


def measure(options: list[str]) -> dict[str, Any]:
    """Runs pytest with further options."""
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=0.05", *options]
    begun, before = time.monotonic(), os.times()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not _DURATION.match(line):
                print(line, end="", flush=True)
    used = os.times()
    files = seconds_by_file(lines)
    return {
        "minutes": round((time.monotonic() - begun) / 60, 2),
        "cpu_minutes": round(
            (used.children_user - before.children_user + used.children_system - before.children_system) / 60, 2
        ),
        "status": process.returncode,
        **{outcome: int(count) for count, outcome in _OUTCOMES.findall(lines[-1] if lines else "")},
        "seconds_of_tests": round(sum(files.values())),
        "slowest_files": {
            file: round(files[file], 1) for file in sorted(files, key=files.__getitem__, reverse=True)[:20]
        },
    }


def main() -> None:
    parser = parser_of(__doc__)
    arguments, options = parser.parse_known_args()
    record = {"benchmark": "suite", "command": shlex.join(["pytest", *options]), **surroundings("cpu")}
    record |= measure(options)
    publish(record, arguments.output)
    raise SystemExit(record["status"])


if __name__ == "__main__":
    main()
