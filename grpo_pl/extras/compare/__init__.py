"""Two runs or exports on the same held-out problems with the same keys: which one is better, and on what."""

from grpo_pl.extras.compare.compared import Comparison, compare
from grpo_pl.extras.compare.paired import Answer, Pair, PairedProblems, paired_bootstrap

__all__ = ["Answer", "Comparison", "Pair", "PairedProblems", "compare", "paired_bootstrap"]
