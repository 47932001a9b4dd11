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


def show_with_sides(env: Any, observation: Any) -> str:
    """The map, and below it the fields to the left, down, right and up of the player; ``#`` is the edge."""
    lines = show(env, observation).split("\n")
    row, column = divmod(int(observation), len(lines[0]))
    edged = ["#" * (len(lines[0]) + 2), *(f"#{line}#" for line in lines), "#" * (len(lines[0]) + 2)]
    sides = ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column))
    return "\n".join([*lines, "".join(edged[r + 1][c + 1] for r, c in sides)])


def parse(action: str, space: Any) -> int | None:
    """The number of the move that a text is the name of."""
    word = action.strip().lower()
    return MOVES.index(word) if word in MOVES else None
