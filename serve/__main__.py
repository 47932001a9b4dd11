"""``python -m serve --model …`` is ``grpo-pl serve --model …``."""

from __future__ import annotations

import sys


def main() -> int:
    from grpo_pl.cli.main import main as grpo_pl

    return grpo_pl(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
