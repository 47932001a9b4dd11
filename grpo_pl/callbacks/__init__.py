"""Callbacks around the training step: checkpoints, validation at both ends, progress, export, the closing table."""
