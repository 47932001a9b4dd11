"""Rewards inside the server's worker: rewards that hold rewards, and columns that are missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.policy.trained import find_model
from serve.metrics import ServerMetrics
from serve.scoring import Scorer, ScoreRoute
from tests.serve.conftest import altered


@pytest.fixture(scope="module")
def mixed(start: Callable[..., Any], export: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose rewards are those of a mixture and hold further ones."""
    math, exact = ({"class_path": f"grpo_pl.rewards.{name}Reward", "init_args": {}} for name in ("Math", "Exact"))
    rewards = [
        {
            "class_path": "grpo_pl.rewards.PerSource",
            "init_args": {"name": "right", "correctness": True, "rewards": {"algebra": math, "words": exact}},
        },
        {
            "class_path": "grpo_pl.rewards.LengthReward",
            "init_args": {"shape": "cosine", "max_length": 40, "correct": math},
        },
    ]
    return start(model=altered(export, tmp_path_factory.mktemp("mixed") / "export", rewards=rewards))


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
    scorer = Scorer(max_queue=1)
    options: dict[str, Any] = {"model": model, "scorer": scorer, "deadline_s": 1.0, "max_queue": 1}
    route = ScoreRoute(**options, metrics=ServerMetrics(), needs={"completion_ids"})
    columns = route._columns([{"completion": "<think>12", "answer": "5"}])
    assert columns["completion_ids"] == [[*model.tokenizer("12").input_ids, model.tokenizer.eos_token_id]]
    assert "completion_length" not in columns
    unasked = ScoreRoute(**options, metrics=ServerMetrics(), needs=())
    assert set(unasked._columns([{"completion": "12", "answer": "5"}])) == {"prompt", "question"}
