"""Tasks of Gymnasium's environments, which are looked at by playing some episodes at random."""

from __future__ import annotations

import re
from typing import Any

from grpo_pl.tools.scaffold.draft import Draft

EPISODES = 200
"""Episodes of random actions that an environment is looked at in."""
LONGEST_EPISODE = 40
"""Actions of an episode at most."""
MOST_NUMBERS = 32
"""Numbers of an observation at most."""


# --- Gymnasium ------------------------------------------------------------------------------------------------------


def of_environment(name: str) -> Draft:
    """The draft of an environment with numbered actions.

    Raises:
        ImportError: gymnasium is not installed.
        ValueError: no such environment, one with other actions or with observations that are no few numbers, or one in
            which random actions are all worth the same.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("gymnasium is not installed: pip install 'grpo_pl[environments]'.") from error
    try:
        env: Any = gymnasium.make(name, disable_env_checker=True)
    except Exception as error:  # gymnasium's own errors, or whatever the environment raises
        detail = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        raise ValueError(f"gymnasium cannot make {name!r}: {detail}") from error
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        raise ValueError(
            f"{name!r} takes actions of {env.action_space}; `grpo-pl new` writes tasks with numbered ones."
        )
    rewards, widths = _random_play(env)
    env.close()
    turns = max(2, min(LONGEST_EPISODE, sorted(map(len, rewards))[len(rewards) * 19 // 20]))
    returns = [sum(episode[:turns]) for episode in rewards]  # of what an episode may reach in so many
    if max(returns) == min(returns):
        raise ValueError(
            f"{EPISODES} episodes of {turns} random actions in {name!r} all return {returns[0]:g}: none is a "
            "demonstration, and no completion would be better than another."
        )
    first, count = int(env.action_space.start), int(env.action_space.n)
    action = max(len(str(first)), len(str(first + count - 1))) + 1
    return Draft(
        kind="gymnasium",
        title=f"Gymnasium's {name}, action by action.",
        values={"id": name, "turns": turns, "threshold": repr(max(returns)), "episodes": EPISODES},
        notes=[f"an episode counts as right from a return of {max(returns):g}, the best of {EPISODES} random ones."],
        config={
            "turns": turns,
            "completion": action,
            "context": -(-((turns + 1) * (max(widths) + 2 + action) + 16) // 32) * 32,
            "held_out": 50,
        },
    )


def _random_play(env: Any) -> tuple[list[list[float]], list[int]]:
    """The rewards of episodes of random actions, action by action, and the characters of each longest observation."""
    rewards: list[list[float]] = []
    widths = []
    env.action_space.seed(0)
    for seed in range(EPISODES):
        observation, _ = env.reset(seed=seed)
        episode: list[float] = []
        done, width = False, 0
        while not done and len(episode) < LONGEST_EPISODE:
            numbers = _numbers(observation)
            if numbers is None or len(numbers) > MOST_NUMBERS:
                raise ValueError(f"its observations are {env.observation_space}: too much to read as a few numbers.")
            width = max(width, sum(1 + len(str(n) if isinstance(n, int) else f"{n:.1f}") for n in numbers) + 1)
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
            episode.append(float(reward))
        rewards.append(episode)
        widths.append(width)
    return rewards, widths


def _numbers(observation: Any) -> list[Any] | None:
    """The numbers of an array, a tuple or a number; None of anything else."""
    if hasattr(observation, "ravel"):
        return list(observation.ravel().tolist())
    if isinstance(observation, tuple):
        parts = [_numbers(part) for part in observation]
        return None if None in parts else [number for part in parts if part is not None for number in part]
    return [observation] if isinstance(observation, int | float) else None
