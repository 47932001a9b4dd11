"""What is logged and warned of, counted by hand: of a step, and over the steps of a run."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import EnvironmentReward, ExactReward, FormatReward, PerSource
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import StepLog, broken_share, experience_metrics
from grpo_pl.training.optimization import TrainingDiverged
from grpo_pl.training.update import UpdateResult
from grpo_pl.types import Problem, PromptBatch

Measure = Callable[..., dict[str, float]]

RIGHT = "<think></think><answer>\\boxed{7}</answer>"
TEXTS = {
    1: [RIGHT, "\\boxed{7}", "Wait, \\boxed{5}", "no"],
    2: ["Check", "waiting", "\\boxed{9}", "n" * 80],
}


@pytest.fixture
def metrics(make_experience: Callable[..., Experience]) -> Measure:
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


def test_rewards_and_their_spread(metrics: Measure) -> None:
    got = metrics()
    # group 1: 1.5, 1, 0, 0; group 2: four times 0
    assert got["reward"] == pytest.approx(2.5 / 8)
    assert got["reward_std"] == pytest.approx((0.75 + 0.0) / 2)  # the sample's: sqrt(1.6875 / 3) and 0
    assert got["frac_reward_zero_std"] == 0.5
    assert got["rewards/exact/mean"] == pytest.approx(2 / 8)
    assert got["rewards/format/mean"] == pytest.approx(1 / 8)


def test_lengths_of_right_and_of_wrong_completions(metrics: Measure) -> None:
    got = metrics()
    first = [4 + len("\\boxed{7}") + 1, 10, 16, 3]  # a tag is one token, and EOS counts
    second = [6, 8, 10, 40]
    assert got["completions/mean_length"] == pytest.approx(sum(first + second) / 8)
    assert (got["completions/min_length"], got["completions/max_length"]) == (3, 40)
    assert got["completions/clipped_ratio"] == 1 / 8
    assert got["completions/mean_length_correct"] == pytest.approx(sum(first[:2]) / 2)
    assert got["completions/mean_length_wrong"] == pytest.approx(sum(first[2:] + second) / 6)


def test_reflection_words_are_counted_per_completion_in_any_case(metrics: Measure) -> None:
    assert metrics()["completions/reflection_rate"] == 3 / 8
    assert metrics(words=("box", "7"))["completions/reflection_rate"] == 4 / 8


def test_a_step_that_the_policy_broke_is_no_broken_judge() -> None:
    counted = {f"rewards/{name}/status/killed": 4.0 for name in ("environment", "per_source", "exact")}
    paid = EnvironmentReward()
    nested = PerSource(rewards={"games": paid, "sums": ExactReward()})
    assert broken_share(counted, [paid, nested], 8) == 0.0
    assert broken_share(counted, [paid, ExactReward()], 8) == 0.5


def test_statuses_are_counted_and_those_that_did_not_occur_left_out(metrics: Measure) -> None:
    got = metrics()
    assert got["rewards/exact/status/no_answer"] == 4
    assert "rewards/exact/status/bad_gold" not in got


def test_a_bad_gold_answer_drops_its_completions_and_leaves_the_mean_alone(metrics: Measure) -> None:
    got = metrics(answers=("", "8"))
    assert got["rewards/exact/status/bad_gold"] == 4
    assert got["rewards/exact/mean"] == 0.0  # of the four that could be judged


def test_a_mean_over_nothing_is_left_out(metrics: Measure) -> None:
    got = metrics(answers=("1", "2"))
    assert "completions/mean_length_correct" not in got
    assert "completions/mean_length_wrong" in got
    assert all(value == value for value in got.values())


Make = Callable[[Reward], Experience]


class Slow(ExactReward):
    """Takes too long for the answer 11."""

    def __call__(self, completions: Sequence[str], *others: Any) -> list[Score]:
        scores = super().__call__(completions, *others)
        return [
            Score(0.0, "timeout") if text == "11" else score for text, score in zip(completions, scores, strict=True)
        ]


UPDATED = UpdateResult(
    sums={"entropy": (torch.tensor(6.0), torch.tensor(4.0))},
    losses=[1.0, 2.0],
    grad_norms=[3.0],
    taken=[True, True],
    seconds={"update": 0.5},
)


@pytest.fixture
def experience(make_experience: Callable[..., Experience]) -> Make:
    """Completions of two and of three tokens, the ends included."""

    def make(reward: Reward) -> Experience:
        return make_experience(
            {0: ["2", "11"]},
            batch=PromptBatch(step=0, prompts=[Problem(id=0, question="1+1=", answer="2")], valid=[True]),
            rewards=[reward],
            algorithm=GRPOAlgorithm(group_size=2, beta=0.0),
            max_completion_length=4,
        )

    return make


def _metrics(log: StepLog, experience: Experience, result: UpdateResult = UPDATED, **more: float) -> dict[str, float]:
    return log.metrics(experience, result, Collective(), more=more, lr=0.1, step_seconds=9.0)


def test_names_and_their_order_are_those_of_the_stages(experience: Make) -> None:
    reward = ExactReward(correctness=True)
    found = _metrics(StepLog([reward], ["wait"]), experience(reward), callback=7.0)
    first = list(found).index("entropy")
    stages = [f"time/{stage}" for stage in ("rollout", "reward", "logprobs", "update")]
    assert list(found)[first:] == [
        *("entropy", "callback", "num_tokens", "lr", "updates/skipped", "step_time", *stages, "loss", "grad_norm")
    ]
    assert "reward" in list(found)[:first]
    assert found["entropy"] == 1.5 and found["callback"] == 7.0 and found["lr"] == 0.1
    assert (found["loss"], found["grad_norm"], found["step_time"], found["time/update"]) == (1.5, 3.0, 9.0, 0.5)


def test_tokens_add_up_over_the_steps_also_of_a_resumed_run(experience: Make) -> None:
    reward = ExactReward(correctness=True)
    log, drawn = StepLog([reward], []), experience(reward)
    assert [_metrics(log, drawn)["num_tokens"] for _ in range(2)] == [5.0, 10.0]
    assert log.state_dict() == {"tokens_seen": 10, "skipped_in_a_row": 0}
    resumed = StepLog([reward], [])
    resumed.load_state_dict(log.state_dict())
    assert _metrics(resumed, drawn)["num_tokens"] == 15.0


def test_a_step_without_an_update_has_no_loss(experience: Make) -> None:
    reward = ExactReward(correctness=True)
    found = _metrics(StepLog([reward], []), experience(reward), replace(UPDATED, losses=[], grad_norms=[], taken=[]))
    assert "loss" not in found and "grad_norm" not in found and found["updates/skipped"] == 0.0


def test_broken_rewards_are_warned_of_once(experience: Make) -> None:
    reward = Slow(correctness=True)
    log, drawn = StepLog([reward], []), experience(reward)
    with pytest.warns(UserWarning, match=r"Judging 50\.0% of the completions of this step timed out"):
        _metrics(log, drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _metrics(log, drawn)


class Absent(ExactReward):
    """Judges nothing."""

    def __call__(self, completions: Sequence[str], *others: Any) -> list[Score]:
        return [Score(None, "unavailable")] * len(completions)


def test_a_reward_without_values_in_three_steps_in_a_row_is_named_once(experience: Make) -> None:
    absent = Absent(name="absent")
    log, drawn, undrawn = StepLog([absent], []), experience(ExactReward(name="absent")), experience(absent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (undrawn, undrawn, drawn, undrawn, undrawn):  # a server may be away for a while
            _metrics(log, each)
    with pytest.warns(UserWarning, match="'absent' gave no completion a value in 3 steps in a row"):
        _metrics(log, undrawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _metrics(log, undrawn)


def test_failed_episodes_are_warned_of_once_where_they_are_many() -> None:
    log = StepLog([], [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.warn_of_failed_episodes(0.01, "no")
    with pytest.warns(UserWarning, match=r"2\.0% of the episodes .* the first: it hung \(episodes/status"):
        log.warn_of_failed_episodes(0.02, "it hung")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.warn_of_failed_episodes(0.5, "no")


def test_skipped_updates_in_a_row_end_the_run_also_across_a_resume() -> None:
    log = StepLog([], [])
    with pytest.warns(UserWarning, match=r"2 update\(s\) skipped"):
        log.check_divergence([False, False], 3)
    log.check_divergence([True], 3)  # a row begins anew
    with pytest.warns(UserWarning):
        log.check_divergence([False, False], 3)
    log.check_divergence([], 3)  # nothing to learn from: neither good nor bad
    resumed = StepLog([], [])
    resumed.load_state_dict(log.state_dict())
    with pytest.warns(UserWarning), pytest.raises(TrainingDiverged, match=r"^3 updates in a row"):
        resumed.check_divergence([False, True], 3)


def test_skipped_updates_with_good_ones_between_them_are_no_row() -> None:
    log = StepLog([], [])
    for _ in range(5):
        with pytest.warns(UserWarning, match=r"2 update\(s\) skipped"):
            log.check_divergence([True, False, False, True], 3)
