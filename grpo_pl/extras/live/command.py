"""``grpo-pl demo``: a fit to be watched, with one held-out problem answered again and again."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from grpo_pl.cli.commands import check_at_least
from grpo_pl.cli.main import main
from grpo_pl.config.objects import ConfigArguments
from grpo_pl.files.runs import newest_run_folder

LIVE = "grpo_pl.extras.live.callback.LiveView"
DEFAULT = "configs/countdown_search.yaml"
LONG_SEARCH = 65
"""A held-out problem of that configuration that few lines solve."""


def demo(
    config: ConfigArguments = None,
    seed: int | None = None,
    every: int = 10,
    problem: int | None = None,
    runs_dir: str = "runs",
    name: str = "demo",
) -> int:
    """Trains a tiny policy while you watch: what it first wrote about a held-out problem beside what it writes now, and
    how often it is right.

    It is ``grpo-pl fit`` with the callback ``grpo_pl.extras.live.callback.LiveView``. Options of a configuration, as
    --data.steps=60, are passed on. At the end the report opens, where there is a browser to open it.

    Args:
        config: the configuration of the task; null takes configs/countdown_search.yaml.
        seed: seed of the run; null takes that of the configuration.
        every: rollouts between two answers to the problem.
        problem: which of the held-out problems to watch, counted from 0; null takes the first of twenty that the policy
            does not solve at first, and where no configuration is named one that few lines solve.
        runs_dir: folder that holds one folder per run.
        name: name of the run.
    """
    check_at_least(1, every=every)
    items = [str(config)] if isinstance(config, str | Path) else config or []
    if all(item.startswith("--") for item in items):  # options alone
        items = [DEFAULT, *items]
        problem = LONG_SEARCH if problem is None else problem
    watched = f"every_n_rollouts: {every}, problem: {'null' if problem is None else problem}"
    files = [item for item in items if not item.startswith("--")]
    options = [
        *(f"--config={file}" for file in files),
        "--samples.every_n_rollouts=0",
        f"--trainer.enable_progress_bar={str(not sys.stdout.isatty()).lower()}",  # the view has a line of its own
        *(item for item in items if item.startswith("--")),
        *([] if seed is None else [f"--seed_everything={seed}"]),
        f"--runs_dir={runs_dir}",
        f"--name={name}",
        f"--trainer.callbacks+={{class_path: {LIVE}, init_args: {{{watched}}}}}",
    ]
    status = main(["fit", *options])  # in this process, so that Ctrl-C and SIGTERM end it as they end any fit
    run = newest_run_folder(Path(runs_dir), name)
    if status == 0 and run is not None and can_show():
        webbrowser.open(run.report.absolute().as_uri())
    return status


def can_show() -> bool:
    """True where a browser can open on a screen."""
    screen = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return screen and sys.stdout.isatty()
