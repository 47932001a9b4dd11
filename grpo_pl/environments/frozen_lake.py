"""Gymnasium's FrozenLake through text: the map with the player on it, and moves by name."""

from __future__ import annotations

from typing import Any

MOVES = ("left", "down", "right", "up")
"""In the order of Gymnasium's numbers."""
PLAYER = "@"


def show(env: Any, observation: Any) -> str:
    """The map, one line a row, with ``@`` in the place of the field that the player stands on."""
    rows = [[tile.decode() for tile in line] for line in env.unwrapped.desc.tolist()]
    row, column = divmod(int(observation), len(rows[0]))
    rows[row][column] = PLAYER
    return "\n".join("".join(line) for line in rows)


def parse(action: str, space: Any) -> int | None:
    """The number of the move that a text is the name of."""
    word = action.strip().lower()
    return MOVES.index(word) if word in MOVES else None
