"""What is logged and warned of over the steps of a run, counted by hand."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import ExactReward
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import StepLog
from grpo_pl.training.optimization import TrainingDiverged
from grpo_pl.training.update import UpdateResult
from grpo_pl.types import Problem, PromptBatch


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
def experience(make_experience: Callable[..., Experience]) -> Callable[[Reward], Experience]:
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


def test_names_and_their_order_are_those_of_the_stages(experience: Callable[[Reward], Experience]) -> None:
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


def test_tokens_add_up_over_the_steps_also_of_a_resumed_run(experience: Callable[[Reward], Experience]) -> None:
    reward = ExactReward(correctness=True)
    log, drawn = StepLog([reward], []), experience(reward)
    assert [_metrics(log, drawn)["num_tokens"] for _ in range(2)] == [5.0, 10.0]
    assert log.state_dict() == {"tokens_seen": 10, "skipped_in_a_row": 0}
    resumed = StepLog([reward], [])
    resumed.load_state_dict(log.state_dict())
    assert _metrics(resumed, drawn)["num_tokens"] == 15.0


def test_a_step_without_an_update_has_no_loss(experience: Callable[[Reward], Experience]) -> None:
    reward = ExactReward(correctness=True)
    found = _metrics(StepLog([reward], []), experience(reward), replace(UPDATED, losses=[], grad_norms=[], taken=[]))
    assert "loss" not in found and "grad_norm" not in found and found["updates/skipped"] == 0.0


def test_broken_rewards_are_warned_of_once(experience: Callable[[Reward], Experience]) -> None:
    reward = Slow(correctness=True)
    log, drawn = StepLog([reward], []), experience(reward)
    with pytest.warns(UserWarning, match=r"Judging 50\.0% of the completions of this step timed out"):
        _metrics(log, drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _metrics(log, drawn)


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
