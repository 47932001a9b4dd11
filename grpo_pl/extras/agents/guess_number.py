"""TextArena's GuessTheNumber in few words: where the number can still be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def show(game: Any, messages: Sequence[str]) -> str:
    """``1-15`` at first, ``9-15`` once 8 was too low, and the same again after a guess that means nothing."""
    low, high = game.min_number, game.max_number
    for guess, hint in game.state.game_state["guess_history"]:
        low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
    return f"{low}-{high}"
