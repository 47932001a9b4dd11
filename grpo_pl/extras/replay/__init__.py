"""Time travel: any moment of a run again, bit for bit; branches of its past, proofs of its exports, and the reasons of
what it wrote."""

from grpo_pl.extras.replay.explanation import Explanation, why
from grpo_pl.extras.replay.moment import Moment, checkpoint_at, replay
from grpo_pl.extras.replay.proof import Proof, prove
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun

__all__ = [
    "CannotReplay",
    "Explanation",
    "Moment",
    "Proof",
    "RecordedRun",
    "checkpoint_at",
    "prove",
    "replay",
    "why",
]
