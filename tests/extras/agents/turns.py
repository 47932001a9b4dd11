"""Turns of several episodes in a pool."""

from typing import Any

from grpo_pl.extras.agents import EnvironmentPool, Transition


def reset(pool: EnvironmentPool, *episodes: int, seed: int = 0, **row: Any) -> dict[int, Transition]:
    """Begins episodes of one row, and waits for all."""
    for episode in episodes:
        pool.reset(episode, seed=seed, row=row)
    return pool.collect_all()


def step(pool: EnvironmentPool, actions: dict[int, str], **drawn: Any) -> dict[int, Transition]:
    """Takes a turn in each of these episodes, and waits for all."""
    for episode, action in actions.items():
        pool.step(episode, action, drawn=drawn or None)
    return pool.collect_all()
