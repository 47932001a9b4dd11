"""``Follower``: loads every newer checkpoint of a run beside the decoding, which changes to it between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_pl.files.checkpoints import broken, facts_of, newest_sealed
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.loading import eos_ids
from grpo_pl.policy.trained import ServedModel, find_model
from serve.messages import Followed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_POLL_S = 1.0


class NewWeights(NamedTuple):
    """A loaded policy."""

    model: ServedModel
    policy: PreTrainedModel
    eos: list[int]

    @classmethod
    def load(cls, model: ServedModel, device: Any) -> NewWeights:
        """Loads the policy of ``model`` into memory of its own: its files may be overwritten while it is in use.

        Raises:
            ValueError: tensors are missing, or have numbers that are not finite.
        """
        policy = model.load_policy(device)
        for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{model.source}: the weights {name} are not finite, the training has diverged.")
            tensor.data = tensor.data.clone()
        return cls(model, policy, eos_ids(policy, model.tokenizer))


class Follower(threading.Thread):
    """Tells of newer checkpoints of the run that ``model`` belongs to: ``NewWeights``, or ``Followed`` with the reason
    for which one is passed over."""

    def __init__(self, model: ServedModel, device: Any, tell: Callable[[NewWeights | Followed], None]) -> None:
        super().__init__(name="follow", daemon=True)
        self._model, self._device, self._tell = model, device, tell

    def run(self) -> None:
        seen = facts_of(self._model.source)
        while True:
            time.sleep(_POLL_S)
            try:
                path, facts = newest_sealed(self._model.source.parent)
                if path is None or facts == seen:
                    continue
                seen = facts
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise ValueError("it is no regular file")
                if (reason := broken(path)) is not None:
                    raise ValueError(reason)
                self._tell(NewWeights.load(successor(path, self._model), self._device))
            except Exception as error:  # a library may raise anything on a broken file; the loaded weights go on
                message = f"{path} is passed over: {' '.join(str(error).split())}"
                log.warning("%s", message)
                self._tell(Followed("", message))


def successor(path: Path, served: ServedModel) -> ServedModel:
    """The model at ``path``, whose weights can take the place of those of ``served``.

    Raises:
        ValueError: there is no model, or a part of it that the server read at its start is another.
    """
    model = find_model(path, trust_rewards=served.trust_rewards)
    for name in ("template", "rewards", "environment", "episodes", "policy"):
        if getattr(model, name) != getattr(served, name):
            raise ValueError(f"it has another {name} than the served model: start a server for it.")
    return model


def first_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of the run in ``folder``; waits until it has one.

    Raises:
        ValueError: there is no run.
    """
    run = RunFolder(folder)
    if not run.config.is_file():
        raise ValueError(f"--follow {folder}: that is no run folder, because {run.config} is missing.")
    told = False
    while (found := newest_sealed(run.checkpoints)[0]) is None or broken(found) is not None:
        if not told:
            print(f"waiting for the first whole checkpoint of {folder}", flush=True)
        told = True
        time.sleep(_POLL_S)
    return found
