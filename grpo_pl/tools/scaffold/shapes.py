"""Small policies by the length of their rows: narrower for longer ones, so that all take about the same time."""

from __future__ import annotations

from dataclasses import dataclass

WORK = 35e6
"""Most parameters times tokens of a row: with a cold start and ``ROLLOUTS`` rollouts at most six minutes of two cores;
docs/tuning.md has what ten tasks took."""
ROLLOUTS, FEWEST, MOST = 55, 50, 130


@dataclass(frozen=True)
class Shape:
    """Width and layers of a policy."""

    hidden: int
    layers: int

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward blocks, 2.75 times that of the rest."""
        return self.hidden * 11 // 4

    def work(self, tokens: int) -> int:
        """Parameters of the blocks times tokens of a row."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.intermediate) * tokens

    def rollouts(self, tokens: int) -> int:
        """55 where the budget is used up, in proportion more for shorter rows and fewer for longer ones; 50 … 130."""
        return min(MOST, max(FEWEST, round(ROLLOUTS * WORK / self.work(tokens))))


SHAPES = (Shape(128, 3), Shape(112, 3), Shape(96, 3), Shape(80, 3), Shape(64, 3), Shape(64, 2))


def shape_for(tokens: int) -> Shape:
    """The widest policy that trains on rows of so many tokens within the budget; else the smallest."""
    return next((shape for shape in SHAPES if shape.work(tokens) <= WORK), SHAPES[-1])
