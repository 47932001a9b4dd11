"""``WeightSyncCheck``: checks after each rollout that the engine's copy of the weights is the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.policy.library_internals import computing_dtype
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.training.stopwatch import stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 8
"""Completions of each rank that are scored."""
FACTOR = 4.0
FACTOR_FLOAT32 = 10.0
"""Allowed error as a multiple of the first rollout's, in any precision, and where policy and engine compute in float32,
whose rounding is far below the effect of old weights."""
FLOOR = 1e-4
"""Errors up to this are noise of float32."""
FIRST_AT_MOST = 0.2
FIRST_AT_MOST_FLOAT32 = 1e-2
"""Limits of the first error itself, in any precision and where policy and engine compute in float32."""


UNKNOWN = 1 << 40
"""Stands for the version of tokens that are not there."""


class OutOfSync(ValueError):
    """A rollout was not drawn from the policy's weights."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Difference between the log-probabilities of engine and policy for some tokens, over all ranks."""

    error: float
    """NaN if any log-probability is."""
    compared: bool
    """False where no token was there to compare: episodes may have failed before the first action."""
    version: int
    """Updates that the policy had had when the tokens were drawn, as far as the engine knows: its oldest copy."""


@torch.no_grad()
def compare(
    policy: PreTrainedModel,
    samples: Samples,
    version: int | None,
    temperature: float,
    collective: Collective,
    *,
    only: int | None = None,
) -> Comparison:
    """Scores up to `ROWS` completions under the policy as it is. Every rank must call it.

    Args:
        version: of the engine's copy; None takes the oldest that the tokens name.
        only: compare tokens of this version alone.
    """
    rollout = samples.rollout
    versions, written = rollout.policy_version, rollout.action_mask
    if only is not None:
        written = written & (versions == only)
    rows = written.any(dim=1).nonzero().flatten() if only is not None else torch.arange(len(written))
    rows = (rows if len(rows) else torch.arange(len(written))).to(written.device)
    stride = max(1, len(rows) // ROWS)
    rows = rows[samples.step % stride :: stride][:ROWS]
    part = rollout_rows(rollout, rows)
    scored = completion_logprobs(policy, **part, temperature=temperature, with_entropy=False)[0]
    mask = written[rows][:, : scored.shape[1]]
    drawn = rollout.sampling_logprobs[rows, : mask.shape[1]]
    difference = (scored - drawn)[mask].abs().sum() / mask.sum().clamp(min=1)
    if version is None:
        version = int(versions[rollout.action_mask].min()) if rollout.action_mask.any() else UNKNOWN
    found = collective.gather_objects((float(difference), int(mask.sum()), version))
    differences, tokens, known = zip(*found, strict=True)
    return Comparison(error=float(torch.tensor(differences).max()), compared=any(tokens), version=min(known))


class WeightSyncCheck:
    """Compares the engine's log-probabilities of some completions with the policy's.

    error = mean over their tokens of |log π_policy(token) − log π_engine(token)|, the largest over the ranks.

    The first rollout's error of a fit is rounding, since an engine starts with made-up weights and would be far off; a
    later one may be a multiple of that. All ranks come to the same end: by the largest error and the oldest copy.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        """Metrics of the step; none for an engine that reads the live weights."""
        self._bound: float | None = None
        self.updates = 0
        """Updates of the policy so far, one a rollout, those before a resume included."""

    def begin(self, updates: int) -> None:
        """Begins a step, before which the policy has had so many updates."""
        self.updates, self.metrics = updates, {}

    def check(
        self,
        policy: PreTrainedModel,
        samples: Samples,
        seconds: dict[str, float],
        engine: RolloutEngine,
        temperature: float,
        collective: Collective,
        *,
        newest_only: bool = False,
    ) -> None:
        """Holds a rollout to the policy as it is. Every rank must call it.

        Args:
            seconds: where its time is added, as ``sync_proof``.
            newest_only: leave out the tokens that older weights drew; of them something else was found.

        Raises:
            OutOfSync: the engine drew from other weights, or computes something else than the policy.
        """
        version = engine.weights_version
        if version is None:
            return
        only, before = (self.updates, self.metrics) if newest_only else (None, {})
        with stopwatch(seconds, "sync_proof"):
            found = compare(policy, samples, version, temperature, collective, only=only)
        self.judge(found, policy, engine, step=samples.step, expected=self.updates)
        self.metrics = {name: max(value, before.get(name, value)) for name, value in (before | self.metrics).items()}

    def judge(
        self, found: Comparison, policy: PreTrainedModel, engine: RolloutEngine, *, step: int, expected: int
    ) -> None:
        """Takes a comparison for the rollout of ``step``, drawn when the policy had had ``expected`` updates.

        Raises:
            OutOfSync: it was drawn from other weights.
        """
        self.metrics = {"sampling/sync_error": found.error} if found.compared else {}
        bound = self._most(policy, engine)
        if not self.holds(found, policy, engine, expected=expected):
            raise OutOfSync(
                f"rollout {step + 1} was not drawn from the policy's weights: the policy it is due from has had "
                f"{expected} updates, and the engine's copy is that after {found.version}; log-probabilities differ by "
                f"{found.error:.1e} on average, and {bound:.1e} is the most that rounding explains. Nothing was "
                "trained on it: --resume goes on from the last checkpoint with a new copy."
            )
        if found.compared:
            factor = FACTOR_FLOAT32 if _in_float32(policy, engine) else FACTOR
            self._bound = self._bound or max(FLOOR, factor * found.error)

    def holds(self, found: Comparison, policy: PreTrainedModel, engine: RolloutEngine, *, expected: int) -> bool:
        """True if `judge` would accept it."""
        return found.error <= self._most(policy, engine) and found.version in (expected, UNKNOWN)

    def _most(self, policy: PreTrainedModel, engine: RolloutEngine) -> float:
        return self._bound or (FIRST_AT_MOST_FLOAT32 if _in_float32(policy, engine) else FIRST_AT_MOST)


def _in_float32(policy: PreTrainedModel, engine: RolloutEngine) -> bool:
    return getattr(engine, "dtype", None) in (None, "float32") and computing_dtype(policy) == torch.float32
