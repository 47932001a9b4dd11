"""Silences what libraries print that no user of ``grpo-pl`` can act on."""

from __future__ import annotations

import logging
import os
import warnings

UNHELPFUL = (
    ".*does not have many workers.*",  # prompts are made in the main process: there is nothing to load
    ".*dataloader is not resumable.*",  # the data module is: it starts at the first uncompleted rollout
    ".*callbacks used to create the checkpoint need to be provided.*",  # `validate` needs none of fit's
    ".*recommended to use `self.log.*sync_dist=True.*",  # what is logged is over all processes already
    ".*Trainer already configured with model summary.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*``instantiate_classes`` was deprecated.*",
)

CHATTY = (
    "lightning.pytorch.utilities.rank_zero",  # which devices there are
    "lightning.pytorch.trainer.connectors.checkpoint_connector",  # that weights_only was not set
    "lightning.fabric.utilities.seed",  # the seed, which the configuration says
)
"""Loggers whose notes at level INFO help nobody."""


def quiet_libraries() -> None:
    """Call once, before the libraries are used."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
