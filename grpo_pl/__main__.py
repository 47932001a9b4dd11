"""``grpo-pl`` and ``python -m grpo_pl``."""

import sys


def main() -> int:
    """Runs the command line; on Windows it ends in one line, before an import of what only Unix has."""
    if sys.platform == "win32":
        print(
            "grpo-pl: error: grpo_pl runs on Linux and macOS; on Windows use it inside WSL (wsl --install)",
            file=sys.stderr,
        )
        return 1
    from grpo_pl.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
