"""Each part of a mixture by its own rule."""

import pytest

from grpo_pl.rewards import ExactReward, MathReward, PerSource
from grpo_pl.rewards.specs import build_reward


def test_every_completion_is_judged_by_the_rule_of_its_source() -> None:
    reward = PerSource(correctness=True, rewards={"text": ExactReward(), "numbers": MathReward()})
    completions = [r"\boxed{1/2}", r"\boxed{1/2}", r"\boxed{7}"]
    scores = reward(completions, ["0.5", "0.5", "7"], {"source": ["text", "numbers", "text"]})
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]


def test_a_source_without_a_rule_is_refused() -> None:
    reward = PerSource(rewards={"a": ExactReward()})
    with pytest.raises(ValueError, match=r"no reward for the source 'b'; it has \['a'\]"):
        reward(["x"], ["y"], {"source": ["b"]})
    with pytest.raises(ValueError, match="has no `rewards`"):
        PerSource()


def test_an_export_rebuilds_it() -> None:
    reward = PerSource(name="right", correctness=True, rewards={"a": ExactReward(), "b": MathReward(workers=1)})
    assert build_reward(reward.spec()) == reward
