"""A callback that raises after the first rollout."""

import builtins
from typing import Any

from lightning.pytorch.callbacks import Callback


class Failing(Callback):
    def __init__(self, error: str) -> None:
        self.error = getattr(builtins, error)

    def on_train_batch_end(self, *args: Any) -> None:
        raise self.error("as planned")
