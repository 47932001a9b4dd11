"""``Weights``: the versions of the weights with their requests, and ``/v1/weights``, which takes a new one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from fastapi import Response

from grpo_pl.config.objects import build, build_environment
from grpo_pl.files.checkpoints import PATTERN, CheckpointError, broken, facts_of, newest_whole, rollouts_of
from grpo_pl.files.runs import RunFolder
from grpo_pl.openai_format.fields import Body, Text
from grpo_pl.policy.trained import ServedModel, find_model, without_link
from grpo_pl.rewards.base import Reward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from serve.errors import ApiError, bad_request, json_response
from serve.logs import write_output
from serve.scoring import closed_rewards
from serve.versions import DropWeights, LoadWeights
from serve.worker_client import Deadline, WorkerClient

log = logging.getLogger(__name__)

WEIGHTS = "/v1/weights"
_MOST_HELD = 4
"""Versions that are in memory at once: the newest, and earlier ones whose requests are not finished."""
_LOAD_S = 1800.0
_POLL_S = 1.0  # for newer checkpoints of a run that is followed
_DIGITS = 8


@dataclass
class Version:
    """One version of the weights."""

    number: int
    id: str
    source: Path
    since: float
    """When it began to answer, in seconds since 1970."""
    requests: int = 0
    """Requests that it is answering."""

    def entry(self) -> dict[str, Any]:
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="milliseconds")
        return {"id": self.id, "since": since, "requests": self.requests}


class Weights:
    """The versions that the worker holds. A request is answered by one version from its first token to its last.

    Args:
        worker: the client of the worker that holds the model.
        model: what the worker loads at its start, as version 0.
    """

    def __init__(self, worker: WorkerClient, model: ServedModel) -> None:
        self._worker, self.model = worker, model
        self.current = Version(0, version_id(model), model.source, time.time())
        self.held = {0: self.current}
        """The versions in memory by their numbers, oldest first."""
        self._numbers, self._changing, self._freed = count(1), asyncio.Lock(), asyncio.Event()

    @contextmanager
    def lease(self) -> Iterator[Version]:
        """The current version, which stays in memory as long as the context lasts."""
        version = self.current
        version.requests += 1
        try:
            yield version
        finally:
            version.requests -= 1
            self._free(version)

    async def change(self, model: ServedModel) -> Version:
        """Loads the weights of ``model``; requests that begin afterwards are answered by them.

        Raises:
            ApiError: they cannot be loaded (400, 500), or too many earlier versions are still answering (504).
        """
        async with self._changing:
            name = await asyncio.to_thread(version_id, model)
            if name == self.current.id:
                return self.current
            deadline = Deadline(_LOAD_S)
            async with deadline.limit():
                while len(self.held) >= _MOST_HELD:
                    self._freed.clear()
                    await self._freed.wait()
            number, before = next(self._numbers), self.current
            try:
                await self._worker.ask(LoadWeights(number, model), deadline=deadline)
            except BaseException:
                self._worker.notify(DropWeights(number))
                raise
            self.current = self.held[number] = Version(number, name, model.source, time.time())
            self._free(before)
            return self.current

    def _free(self, version: Version) -> None:
        if version is not self.current and not version.requests:
            del self.held[version.number]
            self._worker.notify(DropWeights(version.number))
            self._freed.set()


def version_id(model: ServedModel) -> str:
    """A name that differs from that of other weights: the checkpoint's or folder's, and a digest of the names, sizes
    and times of its files."""
    files = [*model.source.glob("*")] if model.source.is_dir() else [model.source]
    stats = [(file.name, file.stat(follow_symlinks=file.exists())) for file in files]  # a link may lead nowhere
    facts = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return f"{model.source.name.removesuffix('.ckpt')}-{hashlib.blake2b(repr(facts).encode()).hexdigest()[:_DIGITS]}"


class WeightsRequest(Body):
    """``POST /v1/weights``."""

    path: Text | None = None
    """A checkpoint of the same run or an exported folder, on the server's machine; by default the run's newest
    checkpoint."""


class WeightsRoutes:
    """``/v1/weights``: tells the versions in memory, and changes to another one."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._run = weights, run_of(weights.model)

    async def tell(self) -> Response:
        entry = {"object": "weights", **self._weights.current.entry()}
        return json_response(entry | {"held": [version.entry() for version in self._weights.held.values()]})

    async def change(self, body: WeightsRequest) -> Response:
        before = self._weights.current
        path = await asyncio.to_thread(self._newest) if body.path is None else Path(body.path)
        try:
            model = await asyncio.to_thread(weights_of, path, self._weights.model)
        except (ValueError, OSError, CheckpointError) as error:
            raise bad_request("path", str(error)) from None
        now = await self._weights.change(model)
        changed = {"source": str(now.source), "previous": before.id, "changed": now is not before}
        return json_response({"object": "weights", **now.entry(), **changed})

    def _newest(self) -> Path:
        if self._run is None:
            raise bad_request("path", "give one, because the served model lies in no run folder.")
        found = newest_whole(self._run.checkpoints, log.warning)
        if found is None:
            raise bad_request("path", f"{self._run.checkpoints} holds no whole checkpoint.")
        return found


def weights_of(path: Path, served: ServedModel) -> ServedModel:
    """The model at ``path``, if its weights can take the place of those of ``served`` while it is in use.

    Raises:
        ValueError: there is no model, or its prompts, rewards or tokenizer are others.
    """
    model = without_link(find_model(path, trust_rewards=served.trust_rewards))
    run, its_run = run_of(served), run_of(model)
    if model.checkpoint is not None and (run is None or its_run is None or run.path != its_run.path):
        raise ValueError(f"{path} is a checkpoint of another run than the served model: export it, or start a server.")
    for name, built in _BUILT.items():
        ours, its = getattr(served, name), getattr(model, name)
        try:
            same = its == ours or built(model) == built(served)
        except ValueError as error:
            raise ValueError(f"{path} has another {name} than the served model: {error}") from error
        if not same:
            raise ValueError(f"{path} has another {name} than the served model: start a server for it.")
    if model.policy != served.policy and (
        model.tokenizer.get_vocab() != served.tokenizer.get_vocab()
        or model.tokenizer.chat_template != served.tokenizer.chat_template
        or model.context != served.context
    ):
        raise ValueError(f"{path} has another tokenizer or context than the served model: start a server for it.")
    return replace(model, name=served.name)


def _rewards(model: ServedModel) -> dict[str, Mapping[str, Any]]:
    """The rewards by name, each with its class and all arguments, whichever way they are spelt: an export names a class
    by its module and every argument, a run's configuration as its author did."""
    pairs = zip(closed_rewards(model), model.rewards, strict=True)
    return {reward.name: _spec(reward, given) for reward, given in pairs}


def _spec(reward: Reward, given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return reward.spec()
    except TypeError:  # of a class that cannot tell its arguments
        kind = type(reward)
        return {**given, "class_path": f"{kind.__module__}.{kind.__qualname__}"}


_BUILT: Mapping[str, Callable[[ServedModel], Any]] = {
    "template": lambda model: model.template,
    "rewards": _rewards,
    "environment": lambda model: (
        model.environment and build_environment(model.environment, trust=model.trust_rewards).spec()
    ),
    "episodes": lambda model: build(EpisodeSettings, dict(model.episodes), "episodes"),
}
"""Parts that must be the same in another version of the weights, as its settings build them."""


def run_of(model: ServedModel) -> RunFolder | None:
    """The run folder that an export or a checkpoint lies in, if any."""
    folder = model.source.absolute().parent
    run = RunFolder((folder.parent if model.checkpoint is not None else folder).resolve())
    return run if run.config.is_file() else None


class Follower:
    """Changes to every newer checkpoint of a run in training, as soon as it is whole."""

    def __init__(self, weights: Weights, run: RunFolder) -> None:
        self._weights, self._run = weights, run
        self._seen = facts_of(weights.model.source)  # of the checkpoint that was loaded or passed over last

    async def follow(self) -> None:
        """Runs until it is cancelled; a checkpoint that cannot be loaded is passed over with a warning."""
        while True:
            await asyncio.sleep(_POLL_S)
            path, facts = await asyncio.to_thread(newest_sealed, self._run)
            if path is None or facts == self._seen:
                continue
            self._seen = facts
            try:
                if reason := await asyncio.to_thread(broken, path):
                    raise ValueError(reason)
                await self._weights.change(await asyncio.to_thread(weights_of, path, self._weights.model))
            except (ValueError, OSError, CheckpointError, ApiError) as error:
                log.warning("%s is passed over: %s", path, error.message if isinstance(error, ApiError) else error)


def first_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of the run in ``folder``; waits until it has one.

    Raises:
        ValueError: there is no run.
    """
    run = RunFolder(folder)
    if not run.config.is_file():
        raise ValueError(f"--follow {folder}: that is no run folder, because {run.config} is missing.")
    told = False
    while (found := newest_whole(run.checkpoints, log.warning)) is None:
        if not told:
            write_output(f"waiting for the first checkpoint of {folder}")
        told = True
        time.sleep(_POLL_S)
    return found


def newest_sealed(run: RunFolder) -> tuple[Path | None, dict[str, Any] | None]:
    """The run's checkpoint with the highest number that has been completed, and its marker; no other file is read."""
    for path in sorted(run.checkpoints.glob(PATTERN), key=rollouts_of, reverse=True):
        if (facts := facts_of(path)) is not None:
            return path, facts
    return None, None
