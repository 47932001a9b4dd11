"""Scores: rewards inside rewards, missing columns, what is told of each completion, and advantages of a group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.callbacks.record import plain_fields
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import ExactReward, FormatReward
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.score_items import ScoreItems, score_items
from serve.rewards import RewardSpec
from serve.scoring import group_objective


@pytest.mark.slow
def test_a_server_scores_with_rewards_inside_rewards(mixed: Any) -> None:
    items = [
        {"completion": r"\boxed{0.5}", "answer": "1/2", "source": source, "completion_length": 20}
        for source in ("algebra", "words")
    ]
    answer = mixed.ask("/v1/score", {"items": items})
    assert [item["rewards"]["right"]["value"] for item in answer["items"]] == [1.0, 0.0]
    assert [item["rewards"]["length"]["value"] for item in answer["items"]] == pytest.approx([0.75, 0.75])
    assert [item["correct"] for item in answer["items"]] == [True, False]


def test_a_server_votes_with_rewards_inside_rewards(mixed: Any) -> None:
    items = [{"problem": "1+1=", "answer": "2", "source": "algebra"}]
    answer = mixed.ask("/v1/evaluate", {"items": items, "n": 4, "max_tokens": 8, "seed": 0})
    assert len(answer["items"][0]["samples"]) == 4
    assert "maj@4" in answer["summary"]["metrics"]


@pytest.mark.parametrize("source", [{}, {"source": "history"}])
def test_an_item_without_a_rule_is_the_clients_mistake(mixed: Any, source: dict[str, str]) -> None:
    items = [{"completion": r"\boxed{5}", "answer": "5", **source}]
    error = mixed.refusal("/v1/score", {"items": items})
    assert error["code"] == "missing_column"
    assert "'source' must be one of 'algebra', 'words'" in error["message"]
    problems = [{"problem": "1+1=", "answer": "2", **source}]
    assert mixed.refusal("/v1/evaluate", {"items": problems, "n": 2, "max_tokens": 4})["code"] == "missing_column"
    assert mixed.call("GET", "/ready")[0] == 200


def test_completions_are_tokenised_only_where_a_reward_reads_it(server: Any, mixed: Any) -> None:
    long = {"completion": "1" * 200_000, "answer": "5", "source": "algebra"}
    error = mixed.refusal("/v1/score", {"items": [long]})
    assert error["code"] == "too_long"
    assert "completion_length" in error["message"]
    mixed.ask("/v1/score", {"items": [{**long, "completion_length": 200_000}]})
    right = {"completion": r"\boxed{5}", "answer": "5", "source": "algebra"}
    items = [right, {**right, "completion_length": 10}, {**right, "completion_length": 30}]
    lengths = [mixed.post("/v1/score", {"items": [item]})[1]["items"][0]["rewards"]["length"] for item in items]
    assert lengths[0] == lengths[1] != lengths[2]  # nine characters and the end token
    server.ask("/v1/score", {"items": [long]})


def test_completion_ids_are_those_of_the_policy(export: Path) -> None:
    model = find_model(export)
    spec = RewardSpec(model, deadline=1.0, max_queue=1)
    spec._needs = {"completion_ids"}
    columns = spec._columns([{"completion": "<think>12", "answer": "5"}])
    assert columns["completion_ids"] == [[*model.tokenizer("12").input_ids, model.tokenizer.eos_token_id]]
    assert "completion_length" not in columns
    spec._needs = set()
    assert set(spec._columns([{"completion": "12", "answer": "5"}])) == {"prompt", "question"}


@dataclass(kw_only=True)
class Length(Reward):
    """Judges all of the text."""

    name: str = "length"

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(1.0, "ok") for _ in completions]


@pytest.mark.parametrize(
    ("reward", "completion", "extracted"),
    [
        (ExactReward(correctness=True), r"so \boxed{ 7 }", "7"),
        (ExactReward(correctness=True), r"\boxed{7}, or 8", "7"),
        (ExactReward(correctness=True), "7", None),
        (ExactReward(correctness=True, answer_in="last_number"), r"\boxed{7}, or 8", "8"),
        (ExactReward(correctness=True, answer_in="last_number"), "none", None),
        (ExactReward(correctness=True, answer_in="pattern", answer_pattern="####"), "1\n#### 8\n9", "8"),
        (ExactReward(correctness=True, answer_in="json"), '{"answer": 8}', "8"),
        (ExactReward(correctness=True, answer_in="last_number"), "7" * 3000 + " ", None),  # which is all of the text
        (ExactReward(correctness=True, answer_in="last_number"), "is " + "7" * 3000, "7" * 1000),
        (Length(correctness=True), "a long story", None),
        (Length(correctness=True), "a <answer>story</answer>", "story"),
    ],
)
def test_the_answer_that_the_correctness_reward_read_is_told(
    reward: Reward, completion: str, extracted: str | None
) -> None:
    job = ScoreItems([completion], ["7"], {})
    (item,) = score_items([FormatReward(weight=0.1), reward], job, slice(None))
    assert item["extracted"] == extracted


def _objective(**fields: Any) -> Any:
    return group_objective(plain_fields(GRPOAlgorithm(**fields)))


def test_each_objective_gives_its_own_advantages_under_its_name() -> None:
    """Rewards 1, 0, 0, 1: mean 0.5, sample std 0.577; the mean of the others of a 1 is 1/3."""
    rewards, correct = [1.0, 0.0, 0.0, 1.0], [True, False, False, True]
    grpo = _objective()
    assert (grpo.name, grpo.formula) == ("grpo", "(reward − mean) / (std + 1e-05)")
    assert grpo.advantages(rewards, correct) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    dr = _objective(scale="none", aggregation="constant", beta=0.0)
    assert (dr.name, dr.formula) == ("dr_grpo", "reward − mean")
    assert dr.advantages(rewards, correct) == pytest.approx([0.5, -0.5, -0.5, 0.5])
    rloo = _objective(baseline="leave_one_out", scale="none")
    assert rloo.advantages(rewards, correct) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_a_sample_without_a_reward_has_no_advantage_and_moves_no_other() -> None:
    dr = _objective(scale="none")
    assert dr.advantages([1.0, None, 0.0], [True, None, False]) == [0.5, None, -0.5]
    assert dr.advantages([1.0], [True]) == [0.0]  # alone in its group
    assert dr.advantages([None, None], [None, None]) == [None, None]


def test_what_takes_more_than_a_group_says_so_and_gives_grpos() -> None:
    batch = _objective(scale="batch_std")
    assert (batch.name, batch.trained) == ("grpo", "grpo, scale batch_std")
    assert batch.formula.endswith(
        "; trained with grpo, scale batch_std, whose advantages cannot be shown for one group"
    )


@pytest.mark.parametrize("given", [{}, {"baseline": {"class_path": "mine.Own"}}, {"unknown": 1}, {"scale": "odd"}])
def test_an_export_that_does_not_say_gets_grpos(given: dict[str, Any]) -> None:
    assert group_objective(given).name == "grpo"


def test_a_group_has_its_statistics() -> None:
    items = [{"value": value, "correct": bool(value)} for value in (1.0, 0.0)]
    found = _objective(scale="none", aggregation="constant", beta=0.0).group(items)
    assert [item["advantage"] for item in found["items"]] == [0.5, -0.5]
    assert found["group"] == {
        "mean": 0.5,
        "std": pytest.approx(0.7071, abs=1e-4),
        "scored": 2,
        "objective": "dr_grpo",
        "formula": "reward − mean",
    }
