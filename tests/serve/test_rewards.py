"""Rewards inside the server's worker: hostile answers, rewards that hold rewards, and columns that are missing."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import MathReward
from serve.metrics import ServerMetrics
from serve.scoring import Scorer, ScoreRoute

HOSTILE = [
    ("9^{9^{9^9}}", "5"),
    ("9^{9^{9^9}}+1", "5"),
    ("((20!)!)!", "5"),
    ("100000000!", "5"),
    (r"\binom{10^9}{5\cdot10^8}", "5"),
    ("(x+y+2)^{2000}", "x^2+1"),
    ("7" * 10**6, "5"),
    ("(" * 50_000 + "5" + ")" * 50_000, "5"),
    ("\\frac{1}{" * 2_000 + "5" + "}" * 2_000, "5"),
    ("\\begin{pmatrix}" + "\\\\".join(["&".join(["1"] * 200)] * 200) + "\\end{pmatrix}", "5"),
    ("1 " * 50_000, "5"),
    ("", "5"),
    ("6=5", "5"),
    ("x=5", "5"),
    (r"123\cdot456", "56088"),
    ("5 cm", "5 m"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    ("10^{-20}", "10^{-21}"),
    (r"\frac{1}{\mathrm e}", "1/e"),
    ("2", r"2\pi"),
    ("5", r"\frac{"),
    ("1,000", "1000"),
    ("５", "5"),
    ("\0", "5"),
    ("\ud800", "5"),
    ("\u202e5", "5"),
    ("__import__('os').system('x')", "5"),
    (r"\pm2", "2"),
    ("NaN", "NaN"),
    (r"\frac10", r"\frac10"),
]


@pytest.mark.slow
def test_hostile_answers_are_judged_as_in_training(server: Any) -> None:
    """Two requests at once, each of which a right answer ends."""
    pairs = [*HOSTILE, ("1+x", "x+1")]
    items = [{"completion": f"\\boxed{{{answer}}}", "answer": gold} for answer, gold in pairs]
    reward = MathReward()
    expected = reward([item["completion"] for item in items], [item["answer"] for item in items], {})
    reward.close()
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: server.post("/v1/score", {"items": items}), range(2)))
    for status, answer in answers:
        assert status == 200, answer
        told = [item["rewards"]["math"] for item in answer["items"]]
        slow = {"killed": "timeout"}  # which of the two limits ends one is up to the machine's load
        assert [(t["value"], slow.get(t["status"], t["status"])) for t in told] == [
            (s.value, slow.get(s.status, s.status)) for s in expected
        ]
        assert told[-1]["value"] == 1.0


@pytest.fixture(scope="module")
def mixed(start: Callable[..., Any], export: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose rewards are those of a mixture and hold further ones."""
    folder = tmp_path_factory.mktemp("mixed") / "export"
    shutil.copytree(export, folder)
    manifest = json.loads((folder / "grpo_pl.json").read_text())
    math, exact = ({"class_path": f"grpo_pl.rewards.{name}Reward", "init_args": {}} for name in ("Math", "Exact"))
    manifest["rewards"] = [
        {
            "class_path": "grpo_pl.rewards.PerSource",
            "init_args": {"name": "right", "correctness": True, "rewards": {"algebra": math, "words": exact}},
        },
        {
            "class_path": "grpo_pl.rewards.LengthReward",
            "init_args": {"shape": "cosine", "max_length": 40, "correct": math},
        },
    ]
    (folder / "grpo_pl.json").write_text(json.dumps(manifest))
    return start(model=folder)


@pytest.mark.slow
def test_a_server_scores_with_rewards_inside_rewards(mixed: Any) -> None:
    items = [
        {"completion": r"\boxed{0.5}", "answer": "1/2", "source": source, "completion_length": 20}
        for source in ("algebra", "words")
    ]
    status, answer = mixed.post("/v1/score", {"items": items})
    assert status == 200, answer
    assert [item["rewards"]["right"]["value"] for item in answer["items"]] == [1.0, 0.0]
    assert [item["rewards"]["length"]["value"] for item in answer["items"]] == pytest.approx([0.75, 0.75])
    assert [item["correct"] for item in answer["items"]] == [True, False]


def test_a_server_votes_with_rewards_inside_rewards(mixed: Any) -> None:
    items = [{"problem": "1+1=", "answer": "2", "source": "algebra"}]
    status, answer = mixed.post("/v1/evaluate", {"items": items, "n": 4, "max_tokens": 8, "seed": 0})
    assert status == 200, answer
    assert len(answer["items"][0]["samples"]) == 4
    assert "maj@4" in answer["summary"]["metrics"]


@pytest.mark.parametrize("source", [{}, {"source": "history"}])
def test_an_item_without_a_rule_is_the_clients_mistake(mixed: Any, source: dict[str, str]) -> None:
    items = [{"completion": r"\boxed{5}", "answer": "5", **source}]
    status, answer = mixed.post("/v1/score", {"items": items})
    assert (status, answer["error"]["code"]) == (400, "missing_column")
    assert "'source' must be one of 'algebra', 'words'" in answer["error"]["message"]
    problems = [{"problem": "1+1=", "answer": "2", **source}]
    status, answer = mixed.post("/v1/evaluate", {"items": problems, "n": 2, "max_tokens": 4})
    assert (status, answer["error"]["code"]) == (400, "missing_column")
    assert mixed.call("GET", "/ready")[0] == 200


def test_completions_are_tokenised_only_where_a_reward_reads_it(server: Any, mixed: Any) -> None:
    long = {"completion": "1" * 200_000, "answer": "5", "source": "algebra"}
    status, answer = mixed.post("/v1/score", {"items": [long]})
    assert (status, answer["error"]["code"]) == (400, "too_long")
    assert "completion_length" in answer["error"]["message"]
    assert mixed.post("/v1/score", {"items": [{**long, "completion_length": 200_000}]})[0] == 200
    right = {"completion": r"\boxed{5}", "answer": "5", "source": "algebra"}
    items = [right, {**right, "completion_length": 10}, {**right, "completion_length": 30}]
    lengths = [mixed.post("/v1/score", {"items": [item]})[1]["items"][0]["rewards"]["length"] for item in items]
    assert lengths[0] == lengths[1] != lengths[2]  # nine characters and the end token
    assert server.post("/v1/score", {"items": [long]})[0] == 200


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
