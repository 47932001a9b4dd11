"""``Follower``: loads every newer checkpoint of a run beside the decoding, which changes to it between two steps."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_pl.config.objects import build, build_environment
from grpo_pl.files.checkpoints import PATTERN, broken, facts_of, rollouts_of
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.loading import eos_ids
from grpo_pl.policy.trained import ServedModel, find_model
from grpo_pl.rewards.base import Reward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from serve.scoring import closed_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_POLL_S = 1.0
_DIGITS = 8


class Followed(NamedTuple):
    """Message of the worker: the name of new weights, or why the newest checkpoint is passed over."""

    version: str
    error: str = ""


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
    """Looks for newer checkpoints of the run that ``model`` belongs to.

    Args:
        model: what is served first.
        device: where weights are loaded to.
        tell: called with ``NewWeights``, or with ``Followed`` for a checkpoint that is passed over.
    """

    def __init__(self, model: ServedModel, device: Any, tell: Callable[[NewWeights | Followed], None]) -> None:
        super().__init__(name="follow", daemon=True)
        self._model, self._device, self._tell = model, device, tell
        self._checkpoints = model.source.parent

    def run(self) -> None:
        seen = facts_of(self._model.source)
        while True:
            time.sleep(_POLL_S)
            try:
                path, facts = newest_sealed(self._checkpoints)
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
    """The model at ``path``, if its weights can take the place of those of ``served`` while it is in use.

    Raises:
        ValueError: there is no model, or its prompts, rewards or tokenizer are others.
    """
    model = find_model(path, trust_rewards=served.trust_rewards)
    for name, built in _BUILT.items():
        if getattr(model, name) != getattr(served, name) and built(model) != built(served):
            raise ValueError(f"it has another {name} than the served model: start a server for it.")
    if model.policy != served.policy and (
        model.tokenizer.get_vocab() != served.tokenizer.get_vocab()
        or model.tokenizer.chat_template != served.tokenizer.chat_template
        or model.context != served.context
    ):
        raise ValueError("it has another tokenizer or context than the served model: start a server for it.")
    return model


def _spec(reward: Reward, given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return reward.spec()
    except TypeError:  # of a class that cannot tell its arguments
        kind = type(reward)
        return {**given, "class_path": f"{kind.__module__}.{kind.__qualname__}"}


_BUILT: Mapping[str, Callable[[ServedModel], Any]] = {
    "template": lambda model: model.template,
    "rewards": lambda model: {
        reward.name: _spec(reward, given) for reward, given in zip(closed_rewards(model), model.rewards, strict=True)
    },
    "environment": lambda model: (
        model.environment and build_environment(model.environment, trust=model.trust_rewards).spec()
    ),
    "episodes": lambda model: build(EpisodeSettings, dict(model.episodes), "episodes"),
}
"""Parts that must be the same in other weights of a model, as its settings build them."""


def version_id(model: ServedModel) -> str:
    """A name that differs from that of other weights: the checkpoint's or folder's, and a digest of the names, sizes
    and times of its files."""
    files = [*model.source.glob("*")] if model.source.is_dir() else [model.source]
    stats = [(file.name, file.stat(follow_symlinks=file.exists())) for file in files]  # a link may lead nowhere
    facts = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return f"{model.source.name.removesuffix('.ckpt')}-{hashlib.blake2b(repr(facts).encode()).hexdigest()[:_DIGITS]}"


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


def newest_sealed(checkpoints: Path) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint with the highest number that has been completed, and its marker; names that do not match
    ``rollout-NUMBER.ckpt`` are passed over."""
    found = [path for path in checkpoints.glob(PATTERN) if path.stem.removeprefix("rollout-").isdecimal()]
    for path in sorted(found, key=rollouts_of, reverse=True):
        if (facts := facts_of(path)) is not None:
            return path, facts
    return None, None
