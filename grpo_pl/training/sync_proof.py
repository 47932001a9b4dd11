"""``SyncProof``: an engine that keeps a copy of the weights is held to the policy's after every rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.training.collect import Collected
from grpo_pl.training.experience import rollout_rows
from grpo_pl.training.stopwatch import stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 8
"""Completions of each rank that are scored."""
FACTOR = 4.0
FACTOR_FLOAT32 = 10.0
"""How often the first rollout's error a later one may have, in any precision and where policy and engine compute in
float32, whose rounding is far below what old weights bring about."""
FLOOR = 1e-4
"""Errors up to this are noise of float32."""
FIRST_AT_MOST = 0.2
FIRST_AT_MOST_FLOAT32 = 1e-2
"""Limits of the first error itself, in any precision and where policy and engine compute in float32."""


class OutOfSync(ValueError):
    """A rollout was not drawn from the policy's weights."""


class SyncProof:
    """Compares the engine's log-probabilities of some completions with the policy's.

    error = mean over their tokens of |log π_policy(token) − log π_engine(token)|, the largest over the ranks.

    The first rollout's error of a fit is rounding, since an engine starts with made-up weights and would be far off; a
    later one may be a multiple of that. All ranks come to the same end: by the largest error and the oldest copy.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        """What is logged: nothing for an engine that reads the live weights."""
        self._bound: float | None = None
        self._updates = 0
        self._ahead: int | None = None  # updates that the policy had had more than the engine knows of, at the first

    def updated(self) -> None:
        """The policy's weights have been updated, and the engine was told."""
        self._updates += 1

    @torch.no_grad()
    def check(
        self,
        policy: PreTrainedModel,
        collected: Collected,
        engine: RolloutEngine,
        temperature: float,
        collective: Collective,
    ) -> None:
        """Every rank must call it.

        Raises:
            OutOfSync: the engine drew from other weights, or computes something else than the policy.
        """
        if engine.weights_version is None:
            return
        rollout, step = collected.samples.rollout, collected.samples.step
        with stopwatch(collected.seconds, "sync_proof"):
            count = len(rollout.finish_reasons)
            stride = max(1, count // ROWS)
            rows = torch.arange(step % stride, count, stride, device=rollout.completion_ids.device)[:ROWS]
            part = rollout_rows(rollout, rows)
            scored = completion_logprobs(policy, **part, temperature=temperature, with_entropy=False)[0]
            mask = part["action_mask"]
            drawn = rollout.sampling_logprobs[rows, : mask.shape[1]]
            difference = (scored - drawn)[mask].abs().sum() / mask.sum().clamp(min=1)
            found = collective.gather_objects((float(difference), int(mask.sum()), engine.weights_version))
            differences, tokens, versions = zip(*found, strict=True)
            error = float(torch.tensor(differences).max())  # NaN if any is
            compared = any(tokens)  # episodes may have failed before the first action
        self.metrics = {"sampling/sync_error": error} if compared else {}
        if self._ahead is None:
            self._ahead = self._updates - min(versions)
        version = min(versions) + self._ahead
        float32 = _in_float32(policy, engine)
        bound = self._bound or (FIRST_AT_MOST_FLOAT32 if float32 else FIRST_AT_MOST)
        if not error <= bound or version != self._updates:
            raise OutOfSync(
                f"rollout {step + 1} was not drawn from the policy's weights: since the start the policy has had "
                f"{self._updates} updates, and the engine's copy is that after {version}; log-probabilities differ by "
                f"{error:.1e} on average, and {bound:.1e} is the most that rounding explains. Nothing was trained on "
                "it: --resume goes on from the last checkpoint with a new copy."
            )
        if compared:
            self._bound = self._bound or max(FLOOR, (FACTOR_FLOAT32 if float32 else FACTOR) * error)


def _in_float32(policy: PreTrainedModel, engine: RolloutEngine) -> bool:
    computes = (getattr(engine, "dtype", None) or "float32") == "float32" and policy.dtype == torch.float32
    return computes and not torch.is_autocast_enabled(policy.device.type)
