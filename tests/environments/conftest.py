"""Environments of users are found as a project's own modules would be, here and in processes started from here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "plugins"))
