"""Silences messages of libraries that users of ``grpo-pl`` can do nothing about."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UNHELPFUL = (
    ".*does not have many workers.*",  # prompts are made in the main process: there is nothing to load
    ".*dataloader is not resumable.*",  # the data module is: it starts at the first rollout that is not completed
    ".*callbacks used to create the checkpoint need to be provided.*",  # `validate` needs no callback of `fit`
    ".*recommended to use `self.log.*sync_dist=True.*",  # logged values are already over all processes
    ".*Trainer already configured with model summary.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*``instantiate_classes`` was deprecated.*",
)

CHATTY = (
    "lightning.pytorch.utilities.rank_zero",  # the devices of the machine
    "lightning.pytorch.trainer.connectors.checkpoint_connector",  # that weights_only was not set
    "lightning.fabric.utilities.seed",  # the seed, which is in the configuration
)
"""Loggers whose messages of level INFO are not shown."""


def quiet_libraries() -> None:
    """Sets filters, log levels and environment variables; call it once, before the libraries are used."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager: a library that starts inside sets no handlers of signals, and prints nothing on stderr."""
    before: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            for number, handler in before.items():
                if threading.current_thread() is threading.main_thread() and handler is not None:
                    signal.signal(number, handler)
