"""``python -m grpo_pl`` is ``grpo-pl``."""

import sys

from grpo_pl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
