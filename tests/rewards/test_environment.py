"""What an environment paid for episodes, as the reward of a run; and episodes that nobody can be blamed for."""

import math
from typing import Any

import pytest

from grpo_pl.rewards import EnvironmentReward, Score
from grpo_pl.rewards.base import MissingColumn


def episode(*rewards: float, status: str = "ok", value: float | None = math.nan, detail: str = "") -> dict[str, Any]:
    total = sum(rewards) if value is not None and math.isnan(value) else value
    return {"return": total, "status": status, "detail": detail, "turns": [{"reward": reward} for reward in rewards]}


def score(reward: EnvironmentReward, *episodes: Any) -> list[Score]:
    return reward([""] * len(episodes), [""] * len(episodes), {"episode": list(episodes)})


def test_the_value_is_the_return_and_each_turn_has_its_share() -> None:
    low, high, none = score(EnvironmentReward(), episode(0.25, -0.5, 0.0), episode(0.5, 1.0), episode())
    assert low == Score(-0.25, "wrong", turns=(0.25, -0.5, 0.0))
    assert high == Score(1.5, "ok", turns=(0.5, 1.0)) and high.correct
    assert none == Score(0.0, "wrong", turns=())


def test_a_threshold_makes_it_right_or_wrong_as_a_whole() -> None:
    reward = EnvironmentReward(threshold=-1.0, correctness=True)
    reached, missed = score(reward, episode(-0.5, -0.5), episode(-0.5, -0.75))
    assert reached == Score(1.0, "ok") and missed == Score(0.0, "wrong")


def test_an_episode_that_its_environment_failed_has_no_value() -> None:
    failed = episode(1.0, status="timeout", value=None, detail="step took longer than 3 s")
    assert score(EnvironmentReward(), failed) == [Score(None, "unavailable", "step took longer than 3 s")]
    assert score(EnvironmentReward(threshold=0.5), failed)[0].value is None


@pytest.mark.parametrize(
    ("status", "told"), [("timeout", "timeout"), ("killed", "killed"), ("raised", "crashed"), ("policy", "wrong")]
)
def test_a_fault_of_the_policy_keeps_what_was_paid_before(status: str, told: str) -> None:
    assert score(EnvironmentReward(), episode(0.5, 0.0, status=status)) == [Score(0.5, told, turns=(0.5, 0.0))]


@pytest.mark.parametrize(
    "broken", [None, 1.0, {}, {"return": "much", "status": "ok", "turns": []}, episode(1.0, value=math.inf)]
)
def test_what_is_no_episode_is_refused(broken: Any) -> None:
    with pytest.raises(MissingColumn, match="'environment'"):
        score(EnvironmentReward(), broken)


def test_rows_without_episodes_are_refused() -> None:
    with pytest.raises(MissingColumn, match="the column 'episode'"):
        EnvironmentReward()(["7"], ["7"], {})


def test_a_threshold_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="threshold must be a finite number or null, got nan"):
        EnvironmentReward(threshold=math.nan)
