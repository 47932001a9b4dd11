"""A command line of your own: python cli.py fit --config FILE"""

from lightning.pytorch.cli import LightningCLI

import grpo_pl as g
from grpo_pl.cli.run_folder import TRAINER_DEFAULTS
from grpo_pl.data.tasks.sorting import SortingPrompts as SortingPrompts  # a short name is found once it is imported

if __name__ == "__main__":
    options = {"auto_configure_optimizers": False, "save_config_kwargs": {"overwrite": True}}
    LightningCLI(g.GRPOModule, g.RolloutDataModule, trainer_defaults=TRAINER_DEFAULTS, **options)
