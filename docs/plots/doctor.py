"""Draws what the doctor says of the quickstart with too few tokens for an answer and too few held-out problems.

Run ``python docs/plots/doctor.py``; writes ``docs/images/doctor.svg``.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[1] / "images" / "doctor.svg"
COMMAND = (
    "grpo-pl doctor --config configs/quickstart.yaml --model.cold_start.steps 60 \\\n"
    "    --model.sampling.max_completion_length 12 --data.val_prompts 20"
)
WIDTH = 100
"""Characters of a line."""


def drawn(said: str) -> str:
    """The command and the findings of what it said, as a terminal shows them, in SVG that asks for no font."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}\n", "bold"))
    found = [line for line in said.splitlines() if re.match(r"D\d\d |\d+ findings?:", line)]
    for line in found:
        code = re.match(r"D\d\d [^:]*:", line)
        console.print(Text.assemble((code[0], "bold red"), line[code.end() :]) if code else Text(line))
    picture = console.export_svg(title="grpo-pl doctor", unique_id="doctor")
    plain = re.sub(r"\s*@font-face \{.*?\}|\s*<!--.*?-->", "", picture, flags=re.DOTALL)
    return plain.replace("Fira Code, monospace", "monospace")


def main() -> None:
    command = [sys.executable, "-m", "grpo_pl", *shlex.split(COMMAND.replace("\\\n", ""))[1:]]
    wide = {**os.environ, "COLUMNS": "10000"}  # a finding a line
    PICTURE.write_text(drawn(subprocess.run(command, env=wide, capture_output=True, text=True).stdout))


if __name__ == "__main__":
    main()
