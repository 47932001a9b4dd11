"""The checkpoint inside of a cold start, from which one that was killed goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_pl.files.checkpoints import CheckpointError, read_file, save_tensors
from grpo_pl.files.writing import best_effort

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAVE_EVERY_SECONDS = 60.0
"""Shortest time between two checkpoints."""
LARGEST_SHARE = 0.05
"""Most of the time that writing checkpoints may take."""


class SFTCheckpoint:
    """Keeps weights and optimisers of a supervised training that is under way, so that a later process continues it to
    the same last bit. Without a file it keeps nothing.

    Args:
        path: the file. Processes that do the same work at the same time may share it, for all write equal states.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._due_at = time.monotonic() + SAVE_EVERY_SECONDS
        self._state = None
        if path is not None and path.exists():
            try:
                self._state = read_file(path)
            except CheckpointError:  # of a disk that failed: begin again
                path.unlink(missing_ok=True)
        self.steps_done = 0 if self._state is None else int(self._state["steps_done"])
        """Optimiser steps of the process before."""

    def restore(self, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Takes up the state of the process before, if there was one."""
        if self._state is None:
            return
        model.load_state_dict(self._state["state_dict"])
        for optimizer, state in zip(optimizers, self._state["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._state = None  # or it would take its memory for the whole training

    def save_if_due(
        self, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], *, steps_done: int
    ) -> None:
        """Writes the state after a step, unless it was written a short while ago; a full disk only warns."""
        if self.path is None or (begun := time.monotonic()) < self._due_at:
            return
        state = {
            "steps_done": steps_done,
            "state_dict": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        with best_effort(self.path):
            save_tensors(state, self.path, shared=True)
        now = time.monotonic()
        self._due_at = now + max(SAVE_EVERY_SECONDS, (now - begun) / LARGEST_SHARE)

    def remove(self) -> None:
        """Deletes the file, once the result is there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
