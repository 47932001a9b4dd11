"""The metrics of a step, counted by hand on scripted completions."""

from collections.abc import Callable

import pytest

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import EnvironmentReward, ExactReward, FormatReward, PerSource
from grpo_pl.rewards.base import Reward
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import broken_share, experience_metrics
from grpo_pl.types import Problem, PromptBatch

RIGHT = "<think></think><answer>\\boxed{7}</answer>"
TEXTS = {
    1: [RIGHT, "\\boxed{7}", "Wait, \\boxed{5}", "no"],
    2: ["Check", "waiting", "\\boxed{9}", "n" * 80],
}


@pytest.fixture
def metrics(make_experience: Callable[..., Experience]) -> Callable[..., dict[str, float]]:
    def measure(answers: tuple[str, str] = ("7", "8"), words: tuple[str, ...] = ("wait", "check")) -> dict[str, float]:
        rewards: list[Reward] = [ExactReward(correctness=True), FormatReward(weight=0.5)]
        prompts = [Problem(id=i, question="3+4=", answer=answer) for i, answer in enumerate(answers, 1)]
        experience = make_experience(
            TEXTS,
            batch=PromptBatch(step=0, prompts=prompts, valid=[True, True]),
            rewards=rewards,
            algorithm=GRPOAlgorithm(group_size=4, beta=0.0),
            max_completion_length=40,
        )
        return experience_metrics(experience, rewards, Collective(), words)

    return measure


def test_rewards_and_their_spread(metrics: Callable[..., dict[str, float]]) -> None:
    got = metrics()
    # group 1: 1.5, 1, 0, 0; group 2: four times 0
    assert got["reward"] == pytest.approx(2.5 / 8)
    assert got["reward_std"] == pytest.approx((0.75 + 0.0) / 2)  # the sample's: sqrt(1.6875 / 3) and 0
    assert got["frac_reward_zero_std"] == 0.5
    assert got["rewards/exact/mean"] == pytest.approx(2 / 8)
    assert got["rewards/format/mean"] == pytest.approx(1 / 8)


def test_lengths_of_right_and_of_wrong_completions(metrics: Callable[..., dict[str, float]]) -> None:
    got = metrics()
    first = [4 + len("\\boxed{7}") + 1, 10, 16, 3]  # a tag is one token, and EOS counts
    second = [6, 8, 10, 40]
    assert got["completions/mean_length"] == pytest.approx(sum(first + second) / 8)
    assert (got["completions/min_length"], got["completions/max_length"]) == (3, 40)
    assert got["completions/clipped_ratio"] == 1 / 8
    assert got["completions/mean_length_correct"] == pytest.approx(sum(first[:2]) / 2)
    assert got["completions/mean_length_wrong"] == pytest.approx(sum(first[2:] + second) / 6)


def test_reflection_words_are_counted_per_completion_in_any_case(metrics: Callable[..., dict[str, float]]) -> None:
    assert metrics()["completions/reflection_rate"] == 3 / 8
    assert metrics(words=("box", "7"))["completions/reflection_rate"] == 4 / 8


def test_a_step_that_the_policy_broke_is_no_broken_judge() -> None:
    counted = {f"rewards/{name}/status/killed": 4.0 for name in ("environment", "per_source", "exact")}
    paid = EnvironmentReward()
    nested = PerSource(rewards={"games": paid, "sums": ExactReward()})
    assert broken_share(counted, [paid, nested], 8) == 0.0
    assert broken_share(counted, [paid, ExactReward()], 8) == 0.5


def test_statuses_are_counted_and_those_that_did_not_occur_left_out(metrics: Callable[..., dict[str, float]]) -> None:
    got = metrics()
    assert got["rewards/exact/status/no_answer"] == 4
    assert "rewards/exact/status/bad_gold" not in got


def test_a_bad_gold_answer_drops_its_completions_and_leaves_the_mean_alone(
    metrics: Callable[..., dict[str, float]],
) -> None:
    got = metrics(answers=("", "8"))
    assert got["rewards/exact/status/bad_gold"] == 4
    assert got["rewards/exact/mean"] == 0.0  # of the four that could be judged


def test_a_mean_over_nothing_is_left_out(metrics: Callable[..., dict[str, float]]) -> None:
    got = metrics(answers=("1", "2"))
    assert "completions/mean_length_correct" not in got
    assert "completions/mean_length_wrong" in got
    assert all(value == value for value in got.values())
