"""GRPO and its relatives as a modular PyTorch Lightning pipeline."""

__version__ = "0.1.0"
