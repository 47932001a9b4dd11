"""Verbs of ``grpo-pl`` that need no Trainer, one file each."""

VERBS: dict[str, str] = {}
"""Verb -> what it does, in one line. ``commands/<verb>.py`` holds a function of that name; its typed arguments become
options and its docstring becomes their help. It returns an exit status or None for success."""
