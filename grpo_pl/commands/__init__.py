"""Verbs of ``grpo-pl`` that need no Trainer, one file each."""

VERBS: dict[str, str] = {
    "compare": "Fits one configuration under several algorithms: a table, a plot and the curves as CSV.",
    "evaluate": "Answers the problems of a file, in process or through a server, and says how many are right.",
    "serve": "Serves a trained policy over HTTP, with the rewards it was trained on.",
}
"""Verb -> what it does, in one line. ``commands/<verb>.py`` holds a function of that name; its typed arguments become
options and its docstring becomes their help. It returns an exit status or None for success."""
