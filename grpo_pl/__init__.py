"""GRPO and its relatives as a modular PyTorch Lightning pipeline."""

from grpo_pl.files import former_names

__version__ = "0.1.0"

former_names.install()
