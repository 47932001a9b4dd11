"""Time travel: any moment of a run again, bit for bit; branches of its past, proofs of its exports, the reasons of
what it wrote, and the step that taught it an answer."""

from grpo_pl.extras.replay.bisection import Bisection, bisect
from grpo_pl.extras.replay.explanation import Explanation, why
from grpo_pl.extras.replay.moment import Moment, checkpoint_at, replay
from grpo_pl.extras.replay.proof import Proof, prove
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun

__all__ = [
    "Bisection",
    "CannotReplay",
    "Explanation",
    "Moment",
    "Proof",
    "RecordedRun",
    "bisect",
    "checkpoint_at",
    "prove",
    "replay",
    "why",
]
