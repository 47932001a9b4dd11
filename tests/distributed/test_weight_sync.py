"""Ranks whose engines keep different copies of the weights come to one end."""

from collections.abc import Callable
from typing import Any

import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.training.weight_sync import OutOfSync, WeightSyncCheck
from tests.training.test_weight_sync import collected_by


def test_an_older_copy_on_one_rank_ends_the_run_on_all(
    on_two_ranks: Callable[..., list[Any]], make_experience: Any, tiny_policy: Any
) -> None:
    experience = collected_by(make_experience)

    def work(collective: Collective) -> list[str]:
        torch.set_num_threads(1)
        engine, proof = PlainEngine(), WeightSyncCheck()
        engine.weights_version = 0
        proof.check(tiny_policy, experience.samples, {}, engine, 1.0, collective)
        proof.updates = 1
        engine.weights_version = 1 - collective.rank  # the other rank's was not pushed
        try:
            proof.check(tiny_policy, experience.samples, {}, engine, 1.0, collective)
        except OutOfSync as error:
            return [str(error)]
        return []

    first, second = on_two_ranks(work)
    assert first == second
    assert "has had 1 updates, and the engine's copy is that after 0;" in first[0]
