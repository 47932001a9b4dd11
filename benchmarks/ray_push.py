"""Measures what a push of 100 million float32 parameters to an actor on another raylet takes, after
``ray start --head --num-cpus=0 --port=6380`` and ``ray start --address=127.0.0.1:6380 --num-cpus=1``. The record of
2026-11-25 was made beside the HTTP protocol that Ray replaced. With ``RAY_worker_niceness=0`` and this folder in
PYTHONPATH for all three."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import ray
import torch
from common import Cell, interleaved, parser_of, publish, request_of, summary, surroundings
from transformers import PreTrainedModel

from grpo_pl.extras.engines.copy_engine import CopyEngine
from grpo_pl.extras.engines.native_child import NativeChildEngine, NativeWorker
from grpo_pl.extras.engines.ray import RayEngine
from grpo_pl.rollout.engine import ProgressFn
from grpo_pl.types import GenerateRequest, Rollout

CELL = Cell(name="100M", layers=9, hidden=768, intermediate=3072, vocabulary=19_500, heads=12, key_heads=12)


class Taking(NativeWorker):
    """Takes weights as the native engine does, and draws nothing with them."""

    def generate(self, request: GenerateRequest, *, progress: ProgressFn, should_stop: Callable[[], bool]) -> Rollout:
        one, mask = torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
        prompt: dict[str, Any] = {"prompt_ids": one, "prompt_mask": mask}
        drawn: dict[str, Any] = {"completion_ids": one, "completion_mask": mask, "sampling_logprobs": torch.zeros(1, 1)}
        return Rollout(group_size=1, finish_reasons=["length"], **prompt, **drawn)


@dataclass(kw_only=True)
class TakingEngine(NativeChildEngine):
    worker: ClassVar[str] = "ray_push:Taking"


def draws(engine: CopyEngine, model: PreTrainedModel, *, pushed: bool) -> Callable[[], None]:
    """Asks for a rollout, after a push or without one."""
    one = request_of([[5]], group=1, tokens=1)

    def draw() -> None:
        if pushed:
            engine.update_weights(model)
        engine.generate(model, one)

    return draw


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--address", default="127.0.0.1:6380")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    model = CELL.model("cpu")
    engine = RayEngine(engine=TakingEngine(), address=arguments.address)
    arms = {"push": draws(engine, model, pushed=True), "none": draws(engine, model, pushed=False)}
    seconds = interleaved(arms, repetitions=arguments.repetitions, device="cpu")
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    assert ray.get_runtime_context().get_node_id() not in nodes, "the actor may be on this raylet"
    engine.close()
    pushes = [each - statistics.median(seconds["none"]) for each in seconds["push"]]
    record = {"benchmark": "ray_push", **surroundings("cpu"), "ray": version("ray")}
    record |= {"parameters": sum(parameter.numel() for parameter in model.parameters()), "raylets": len(ray.nodes())}
    publish({**record, "seconds": summary(pushes)}, arguments.output)


if __name__ == "__main__":
    from ray_push import main  # as which the actor finds the engine

    main()
