"""What these tests share: the reward of mathematics with its workers, and an endpoint of their own."""

from collections.abc import Iterator

import pytest

from grpo_pl.rewards import MathReward, ReasoningGymReward
from tests.rewards.endpoint import Endpoint


@pytest.fixture(scope="session")
def reward() -> Iterator[MathReward]:
    """With time enough on a busy machine."""
    reward = MathReward(soft_limit_s=5.0, hard_limit_s=20.0)
    yield reward
    reward.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.die()


@pytest.fixture(scope="session")
def gym() -> Iterator[ReasoningGymReward]:
    reward = ReasoningGymReward(workers=2)
    yield reward
    reward.close()
