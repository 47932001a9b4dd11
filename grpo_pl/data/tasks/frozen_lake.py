"""Maps for Gymnasium's FrozenLake made up on the spot, with demonstrations: random walks and some shortest ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.functional.argument_checks import check_at_least, check_within
from grpo_pl.types import Problem

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Field = tuple[int, int]


@dataclass(kw_only=True)
class FrozenLakePrompts(GeneratedPrompts):
    """Maps from the upper left to the lower right with at least one way, in the column ``desc``.

    For ``GymnasiumEnvironment(id="FrozenLake-v1", from_row=["desc"])``, whose first observation is all that the policy
    reads: the question is empty. A map is held out or not by its own hash, so the splits cannot overlap.
    """

    size: int = 4
    """Fields along each side."""
    holes: float = 0.2
    """Chance of each field, but the first and the last, to be a hole."""
    good_share: float = 0.3
    """Share of demonstrations that go a shortest way; the others walk at random, and mostly fall into a hole."""
    longest_stroll: int = 10
    """Most moves of a demonstration that walks at random."""

    MORE: ClassVar[str] = "raise size ({size}), change holes ({holes}), or ask for fewer."

    def __post_init__(self) -> None:
        check_within("[2, 7]", "data.source", size=self.size)  # the number of a map has to fit into 64 bits
        check_within("[0, 1)", "data.source", holes=self.holes)
        check_within("[0, 1]", "data.source", good_share=self.good_share)
        check_at_least(1, "data.source", longest_stroll=self.longest_stroll)

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> list[str]:
        rows = prompt.columns["desc"]
        if rng.random() < self.good_share:
            return _shortest_way(rows, rng)
        at: Field = (0, 0)
        moves: list[str] = []
        while len(moves) < self.longest_stroll and rows[at[0]][at[1]] not in "HG":  # at random
            moves.append(rng.choice(list(MOVES)))
            at = _after(at, moves[-1], rows)
        return moves

    def draw(self, rng: random.Random) -> Problem | None:
        """Each hole by itself; none where no way is left. The number has a bit for each field, set for a hole."""
        last = self.size**2 - 1
        tiles = ["H" if 0 < i < last and rng.random() < self.holes else "F" for i in range(last + 1)]
        identity = sum(1 << i for i, tile in enumerate(tiles) if tile == "H")
        tiles[0], tiles[last] = "S", "G"
        rows = ["".join(tiles[i : i + self.size]) for i in range(0, last + 1, self.size)]
        found = Problem(id=identity, question="", answer="", columns={"desc": rows})
        return found if (0, 0) in _distances(rows) else None


def _distances(rows: Sequence[str]) -> dict[Field, int]:
    """Moves from each field to the goal, for those from which there is a way."""
    goal = (len(rows) - 1, len(rows[0]) - 1)
    distance: dict[Field, int] = {goal: 0}
    waiting = [goal]
    for field in waiting:  # grows while it is walked
        for neighbour in (_after(field, move, rows) for move in MOVES):
            if neighbour not in distance and rows[neighbour[0]][neighbour[1]] != "H":
                distance[neighbour] = distance[field] + 1
                waiting.append(neighbour)
    return distance


def _shortest_way(rows: Sequence[str], rng: random.Random) -> list[str]:
    """The moves of a shortest way, with equal chances at each fork."""
    distance = _distances(rows)
    at: Field = (0, 0)
    moves: list[str] = []
    while distance[at]:
        nearer = [move for move in MOVES if distance.get(_after(at, move, rows)) == distance[at] - 1]
        moves.append(rng.choice(nearer))
        at = _after(at, moves[-1], rows)
    return moves


def _after(field: Field, move: str, rows: Sequence[str]) -> Field:
    """The field after a move; the edge of the map holds the player back."""
    down, right = MOVES[move]
    return min(max(field[0] + down, 0), len(rows) - 1), min(max(field[1] + right, 0), len(rows[0]) - 1)
