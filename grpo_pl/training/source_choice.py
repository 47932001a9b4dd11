"""Chooses where the completions of a run come from."""

from __future__ import annotations

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.training.partial_rollouts import PartialRollouts
from grpo_pl.training.source import RolloutSource, SynchronousRollouts


def rollout_source(
    data: RolloutDataModule, partial_rollouts: PartialRollouts | None, *, group_size: int, longest: int
) -> RolloutSource:
    """Chooses the source of a run by ``data.staleness`` and ``model.partial_rollouts``.

    Raises:
        ValueError: both are set.
    """
    if partial_rollouts is not None:
        if data.staleness > 0:
            raise ValueError("model.partial_rollouts does not go with data.staleness: leave out one of the two.")
        from grpo_pl.extras.engines.partial import PartialRolloutBuffer

        return PartialRolloutBuffer(settings=partial_rollouts, group_size=group_size, longest=longest)
    if data.staleness > 0:
        from grpo_pl.extras.engines.prefetched import PrefetchedRollouts

        return PrefetchedRollouts(data.staleness)
    return SynchronousRollouts()
