"""``python -m serve --model …`` is ``grpo-pl serve --model …``."""

import sys

from grpo_pl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
