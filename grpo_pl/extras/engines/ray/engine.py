"""``RayEngine``: rollouts by actors of a Ray cluster, on one host or on many."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_pl.extras.engines.child.engine import ChildEngine
from grpo_pl.extras.engines.child.main import versions
from grpo_pl.extras.engines.copy_engine import CopyEngine, ModelSpec, Snapshot, WeightsVersion
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rollout.engine import EngineDied, Watching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.extras.agents.episodes import AnyRequest, EngineOutput, EpisodeRequest
    from grpo_pl.extras.engines.ray.pool import ActorPool


@dataclass(kw_only=True)
class RayEngine(CopyEngine):
    """Draws the samples of ``engine``, up to near-ties, in actors on the nodes of a Ray cluster.

    Every rank has actors of its own, of which each draws as many of its prompts. The first rank puts weights into the
    object store, and all actors read them from there. Where an actor or its node dies, another draws its part of the
    rollout again; a second death of a part ends the run.
    """

    engine: ChildEngine
    """The engine whose worker the actors hold, with its settings."""
    actors: int = 1
    """Number of actors that draw for each rank."""
    address: str = "auto"
    """HOST:PORT of the cluster's head; ``auto`` takes $RAY_ADDRESS, or the cluster that this host is a node of."""
    cpus: float = 1.0
    """CPUs of each actor, which computes with as many threads unless ``engine.threads`` says otherwise."""
    gpus: float = 0.0
    """GPUs of each actor; a share of one if several fit into its memory."""
    memory_gib: float = 0.0
    """Main memory that each actor's node must have to give; 0 does not ask. Nothing holds an actor to it."""
    start_s: float = 600.0
    """Most seconds until an actor runs on a node, and until the first rank has put weights there."""
    supports_top_logprobs: ClassVar[bool] = True  # type: ignore[misc]
    memory_bytes: ClassVar[int] = 0  # type: ignore[misc]  # the cluster's affair
    _pool: ActorPool | None = field(default=None, init=False, repr=False, compare=False)
    _run: str | None = field(default=None, init=False, repr=False, compare=False)  # its name, alike on all ranks

    def __post_init__(self) -> None:
        check_at_least(1, "model.engine", actors=self.actors, start_s=self.start_s)
        check_at_least(0, "model.engine", cpus=self.cpus, gpus=self.gpus, memory_gib=self.memory_gib)
        if self.address == "local" or "://" in self.address:
            raise ValueError(f"model.engine: address is {self.address!r}: give auto or HOST:PORT of a running cluster.")
        if getattr(self.engine, "sleep", False):
            raise ValueError("model.engine: actors have GPUs of their own, so none need sleep: set engine.sleep false.")
        self.engine.threads = self.engine.threads or max(1, int(self.cpus))
        self.dtype, self.max_tokens = getattr(self.engine, "dtype", None), self.engine.max_tokens

    @property
    def merges_adapters(self) -> bool:  # type: ignore[override]
        return self.engine.merges_adapters

    @property
    def drawing_engine(self) -> ChildEngine:
        return self.engine

    def check(self) -> None:
        self.engine.check()
        self._join()

    def describe(self) -> str:
        return f"{self.actors} Ray actors with {type(self.engine).__name__}, weights put {self.pushes} times"

    def prepare(self, model: PreTrainedModel) -> None:
        self._agree(model.device)
        super().prepare(model)

    def snapshot(self, model: PreTrainedModel) -> Snapshot:
        self._agree(model.device)
        return super().snapshot(model)

    def play(self, model: PreTrainedModel, request: EpisodeRequest, **watching: Unpack[Watching]) -> EngineOutput:
        return self._with_weights(model, request, **watching)

    def kill(self) -> None:
        if self._pool is not None:
            self._pool.kill()

    def close(self) -> None:
        self.kill()
        self._pool, self._run = None, None
        super().close()

    def _push_weights(
        self, policy: ModelSpec, version: WeightsVersion, weights: Iterator[tuple[str, Tensor]], *, collective: bool
    ) -> None:
        from grpo_pl.extras.engines.ray.pool import ActorPool

        self._join()
        first = self._run is None or dist.get_rank() == 0
        if self._pool is None:
            here = replace(policy, device=torch.device("cuda:0" if self.gpus else "cpu"))
            variables = self.engine.environment(here)
            variables.pop("CUDA_VISIBLE_DEVICES", None)  # Ray sets it
            size = {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": int(self.memory_gib * 2**30) or None}
            options = {**size, "runtime_env": {"env_vars": variables}}
            arguments = self.engine.worker, self.engine.settings(here), versions()
            self._pool = ActorPool(options, arguments, self.actors, self.start_s, self._run if first else None)
        if not first:
            for _ in weights if collective else ():
                pass
            if self._pool.take_weights(str(self._run), version, self._check_stop):
                return
            if collective:
                raise EngineDied(f"the first rank put no weights {version} into the cluster within {self.start_s:g} s.")
        self._pool.put_weights(version, weights, self._check_stop)

    def _draw(self, request: AnyRequest, **watching: Unpack[Watching]) -> EngineOutput:
        assert self._pool is not None
        return self._pool.draw(request, watching.get("progress"), self._check_stop)

    def _join(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("RayEngine needs Ray: pip install 'grpo_pl[ray]', here and on every node of the cluster.")
        from grpo_pl.extras.engines.ray import cluster

        cluster.join(self.address)
        if self._pool is None:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            cluster.check_room(self.actors * ranks, self.cpus, self.gpus)

    def _agree(self, device: torch.device) -> None:
        """Joins in the main thread, where signals are handled; all ranks come to one name of the run."""
        self._join()
        if self._run is None and dist.is_initialized() and dist.get_world_size() > 1:
            told = [uuid.uuid4().hex]
            dist.broadcast_object_list(told, src=0, device=device)
            self._run = told[0]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has actors of its own."""
        return {**super().__getstate__(), "_pool": None, "_run": None}
