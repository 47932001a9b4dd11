"""Each part of a mixture by its own rule."""

import pytest

from grpo_pl.config.objects import build
from grpo_pl.rewards import ExactReward, LengthReward, MathReward, PerSource
from grpo_pl.rewards.base import Reward


def test_every_completion_is_judged_by_the_rule_of_its_source() -> None:
    reward = PerSource(correctness=True, rewards={"text": ExactReward(), "numbers": MathReward()})
    completions = [r"\boxed{1/2}", r"\boxed{1/2}", r"\boxed{7}"]
    scores = reward(completions, ["0.5", "0.5", "7"], {"source": ["text", "numbers", "text"]})
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]


def test_a_source_without_a_rule_is_refused() -> None:
    reward = PerSource(rewards={"a": ExactReward()})
    with pytest.raises(ValueError, match=r"no reward for the source 'b': .* one of 'a'"):
        reward(["x"], ["y"], {"source": ["b"]})
    with pytest.raises(ValueError, match="has no `rewards`"):
        PerSource()


def test_starting_and_closing_reach_the_rewards_inside() -> None:
    inner = MathReward(workers=1, memory_limit_mb=1500)  # a pool of its own
    reward = PerSource(rewards={"a": ExactReward(), "b": LengthReward(shape="cosine", correct=inner)})
    reward.start()
    assert len(inner.pool.pids) == 1
    reward.close()
    assert inner.pool.pids == []


def test_an_export_rebuilds_it() -> None:
    length = LengthReward(shape="cosine", correct=ExactReward())
    reward = PerSource(name="right", correctness=True, rewards={"a": length, "b": MathReward(workers=1)})
    assert build(Reward, reward.spec(), "reward") == reward
