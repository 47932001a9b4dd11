"""TextArena's GuessTheNumber in few words: the range first, then what the game says of each guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def show(game: Any, messages: Sequence[str]) -> str:
    """``1-15`` at first; then ``higher`` or ``lower``, or ``invalid`` for what was no new guess within the range."""
    said = messages[-1] if messages else ""
    for hint in ("higher", "lower"):
        if said.endswith(f"{hint}."):
            return hint
    return f"{game.min_number}-{game.max_number}" if game.state.turn == 0 and not game.state.error_count else "invalid"
