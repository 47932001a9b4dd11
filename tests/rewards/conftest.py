"""The reward of mathematics whose workers these tests share."""

from collections.abc import Iterator

import pytest

from grpo_pl.rewards import MathReward


@pytest.fixture(scope="session")
def reward() -> Iterator[MathReward]:
    """With time enough on a busy machine."""
    reward = MathReward(soft_limit_s=5.0, hard_limit_s=20.0)
    yield reward
    reward.close()
