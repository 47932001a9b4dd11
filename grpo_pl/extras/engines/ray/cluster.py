"""Joins a Ray cluster, keeps weights in its object store, and explains its errors in one line each."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else a death prints dozens of lines here
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")  # after which Ray ends the process
import ray
import torch
from torch import Tensor

from grpo_pl.policy.quiet import undisturbed
from grpo_pl.policy.weights import bucketed
from grpo_pl.rollout.engine import EngineDied

NAMESPACE = "grpo_pl"
_ENDED = "this host's Ray node has ended, as all do a minute after the head: start them again; --resume goes on."
_raylet: list[socket.socket] = []  # of this host, which holds the other end as long as it lives
_START = "`ray start --head` starts one, and `ray start --address=HOST:6379` adds a node."
_TOKEN = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH must be set here as on all nodes, or nowhere."


def join(address: str) -> None:
    """Makes this process a driver of the cluster, as which it stays to its end; a ValueError says what prevents it."""
    if ray.is_initialized():
        return
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # the others of those lines
    try:
        # Ray itself would try for minutes, and end the process then
        found = ray._private.services.canonicalize_bootstrap_address(address) or ""
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        with undisturbed():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:
        if "AuthenticationError" in f"{error!r} {error.__cause__}":
            raise ValueError(f"the Ray cluster at {address} does not take this process's token: {_TOKEN}") from error
        why = _line(error.__cause__ or error)
        raise ValueError(f"no Ray cluster can be joined at {address} ({why}): {_START}") from error


def check_node() -> None:
    """Ends the run in one line where the node on this host has ended: Ray would end the process without a word."""
    if not _raylet:
        _raylet.append(socket.socket(socket.AF_UNIX))
        _raylet[0].connect(ray._private.worker._global_node.raylet_socket_name)
    (poller := select.poll()).register(_raylet[0], select.POLLIN)
    if poller.poll(0):  # its end, for nothing is ever sent
        raise EngineDied(_ENDED, final=True)


def check_room(actors: int, cpus: float, gpus: float) -> None:
    """Raises ValueError where the nodes could not hold so many actors, were nobody else there."""
    sizes = {name: size for name, size in {"CPU": cpus, "GPU": gpus}.items() if size}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(min((node.get(n, 0.0) / s for n, s in sizes.items()), default=1024) + 1e-9) for node in nodes)
    if room < actors:
        wanted = f"{actors} actors of {cpus:g} CPUs and {gpus:g} GPUs are to draw, and the Ray cluster's {len(nodes)}"
        raise ValueError(f"model.engine: {wanted} nodes have room for {room}: ask for less, or add nodes. {_START}")


def put_weights(weights: Iterator[tuple[str, Tensor]], *, watch: Callable[[], None]) -> list[Any]:
    """References to weights in the object store, which live as long as these do. A direct transfer between GPUs would
    take the place of this and `read_weights`."""
    here = ray.get_runtime_context().get_node_id()
    most = sum(n["Resources"].get("object_store_memory", 0.0) for n in ray.nodes() if n["NodeID"] == here)
    references, size = [], 0
    for bucket in bucketed(weights, 256 * 2**20):  # bytes in one object
        watch()
        if (size := size + sum(tensor.nbytes for tensor in bucket.values())) > most:
            what = f"the policy's weights do not fit into the {most / 2**30:.2f} GiB of this node's object store"
            raise ValueError(f"{what}: give `ray start` a larger --object-store-memory.")
        flat = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()}
        # bytes, for numpy has no bfloat16
        data = {n: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy()) for n, t in flat.items()}
        references.append(ray.put(data))
    return references


def read_weights(references: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Mapped without a copy, in memory that must not be written to."""
    ray.wait(references, num_returns=len(references), timeout=0)  # all set out at once
    for reference in references:
        for name, (dtype, shape, data) in ray.get(reference).items():
            yield name, torch.from_numpy(data).view(dtype).reshape(shape)


def cause(error: Exception) -> str:
    """The reason for the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in str(error):
        what = "Ray's memory monitor killed it, because its node was short of memory, whoever uses that"
        return f"{what}: put less there, or raise RAY_memory_usage_threshold where Ray is started"
    if missing := [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))]:
        return f"its node cannot import what the run needs ({missing[-1]}): install grpo_pl[ray] there"
    if "all references to the actor were removed" in str(error):  # which is what Ray makes of it
        return f"the cluster cannot call this process: {_TOKEN}"
    told = [line for line in lines if line.startswith("The actor")][-1:] or [_line(error)]
    return told[0].partition(" Some common causes")[0][:300].rstrip(".")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
