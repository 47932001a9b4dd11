"""``Versions``: the versions of the weights in the model's process; further ones are loaded in a thread of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.native.continuous import ContinuousBatch, batch_of
from serve.worker_channel import Answer, Failure, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class LoadWeights(NamedTuple):
    """Request to load the weights of ``model`` as version ``number``."""

    number: int
    model: ServedModel


class DropWeights(NamedTuple):
    """Message that no request uses a version any more, loaded or not."""

    number: int


@dataclass
class Version:
    """One version of the weights, and the sequences that decode with it."""

    policy: PreTrainedModel
    batch: ContinuousBatch
    precision: str


class Versions:
    """The versions by their numbers; for the worker's one thread.

    Args:
        model: the model that was started, whose tokenizer and endings hold for all versions.
        device: where versions are loaded to.
        size: most sequences that decode with one version at once.
    """

    def __init__(self, model: ServedModel, *, device: str, size: int) -> None:
        self._model, self._device, self._size = model, device, size
        self._sequences = count()  # one count for all: a sequence's number names it, whatever its version
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._loading: dict[int, tuple[int, Future[Version]]] = {}  # by request: number, version
        self._held: dict[int, Version] = {0: self._load(model)}

    def __getitem__(self, number: int) -> Version:
        return self._held[number]

    def __iter__(self) -> Iterator[int]:
        """Numbers of the versions with sequences."""
        return iter([number for number, version in self._held.items() if len(version.batch)])

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def decoding(self) -> bool:
        """True while any version has sequences."""
        return any(len(version.batch) for version in self._held.values())

    def load(self, uid: int, asked: LoadWeights) -> None:
        """Begins to load a version, beside the decoding; `answers` tells of its end."""
        self._loading[uid] = asked.number, self._thread.submit(self._load, asked.model)

    def answers(self) -> Iterator[Answer | Failure]:
        """The answers to requests to load whose version has been loaded since, or could not be."""
        for uid in [uid for uid, (_, version) in self._loading.items() if version.done()]:
            number, loading = self._loading.pop(uid)
            try:
                self._held[number] = loading.result()
            except Exception as error:  # a library may raise anything on a broken file; the loaded versions go on
                told = isinstance(error, ValueError | OSError | CheckpointError)
                log.warning("weights could not be loaded: %s", error, exc_info=None if told else error)
                reason = str(error) if told else f"{type(error).__name__}: {error}"
                message = f"path: the weights cannot be loaded: {reason}"
                yield Failure(uid, InvalidRequest(message, "path", "invalid_value"))
            else:
                yield Answer(uid, None)

    def drop(self, number: int) -> None:
        """Frees a version, or gives up loading it."""
        for uid in [uid for uid, (its, _) in self._loading.items() if its == number]:
            self._loading.pop(uid)[1].cancel()
        if self._held.pop(number, None) is not None:
            gc.unfreeze()  # the first version was there when the worker froze what it had
            gc.collect()  # modules refer to one another: without it their weights would stay for a while
            gc.freeze()

    def empty(self, number: int) -> None:
        """Gives a version a new batch, without the sequences of the one that failed."""
        version = self._held[number]
        version.batch = self._batch(version.policy, version.precision)

    def _load(self, model: ServedModel) -> Version:
        policy = model.load_policy(self._device)
        return Version(policy, self._batch(policy, model.precision), model.precision)

    def _batch(self, policy: PreTrainedModel, precision: str) -> ContinuousBatch:
        return batch_of(replace(self._model, precision=precision), policy, self._size, self._sequences)
