"""``/v1/evaluate``, ``grpo-pl evaluate`` and the parity of rewards between training, commands and server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.cli.commands.score import score
from grpo_pl.cli.local_evaluation import evaluate_whole
from grpo_pl.cli.main import main
from grpo_pl.config.objects import build_rewards
from grpo_pl.evaluation.problems import EvalProblem
from grpo_pl.functional.advantages import subtract_baseline
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards.batch import score_completions
from serve import PolicyAPI, RewardAPI
from serve.errors import ApiError
from serve.evaluation import EvaluateRoute
from serve.schemas import EvaluateRequest, Sampling

COMPLETIONS = [
    r"<think>so</think><answer>\boxed{1/2}</answer>",
    r"<think>so</think><answer>\boxed{0.5}</answer>",
    r"<think>\boxed{0.5}",
    r"\boxed{6=5}",
    "nothing",
    r"<think></think><answer>\boxed{\frac{1}{2}}",
    "",
]


@pytest.fixture(scope="module")
def judged(server: Any) -> Any:
    """What the route says of the completions as a group, and of each with an answer that cannot be read."""
    items = [{"completion": text, "answer": answer} for answer in ("0.5", r"\frac{") for text in COMPLETIONS]
    group = server.ask("/v1/score", {"items": items[: len(COMPLETIONS)], "group": True})
    return items, group, server.ask("/v1/score", {"items": items})["items"]


def test_the_route_scores_as_training_does(judged: Any, export: Path) -> None:
    verdicts = judged[2][: len(COMPLETIONS)]
    rewards = build_rewards(find_model(export).rewards)
    trained = score_completions(
        rewards,
        completions=COMPLETIONS,
        answers=["0.5"] * len(COMPLETIONS),
        columns={"prompt": [""] * len(COMPLETIONS)},
    )
    for reward in rewards:
        reward.close()
    assert [v["value"] for v in verdicts] == trained.totals()
    assert [v["correct"] for v in verdicts] == trained.correct()
    for row, reward in zip(trained.scores, rewards, strict=True):
        told = [v["rewards"][reward.name] for v in verdicts]
        assert [(t["value"], t["status"], t["detail"]) for t in told] == [(s.value, s.status, s.detail) for s in row]
    assert [v["extracted"] for v in verdicts[:4]] == ["1/2", "0.5", "0.5", "6=5"]
    assert verdicts[4]["extracted"] is None
    assert all(v["ms"] >= 0 for v in verdicts)


def test_the_score_command_agrees_with_the_route(judged: Any, export: Path, tmp_path: Path) -> None:
    """Where the gold answer cannot be read there is no sum, although the format has a value."""
    items, _, verdicts = judged
    file, config, out = tmp_path / "rows.jsonl", tmp_path / "config.yaml", tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    config.write_text(json.dumps({"rewards": list(find_model(export).rewards)}))
    assert score(str(file), config=str(config), output=str(out)) == 1
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["reward"] for row in scored] == [v["value"] for v in verdicts]
    assert [row["reward"] is None for row in scored] == [False] * len(COMPLETIONS) + [True] * len(COMPLETIONS)
    assert [row["correct"] for row in scored] == [v["correct"] for v in verdicts]


def test_a_group_gets_the_advantages_of_training(judged: Any) -> None:
    answer = judged[1]
    values = torch.tensor([[item["value"] for item in answer["items"]]], dtype=torch.float64)
    assert answer["group"]["mean"] == pytest.approx(values.mean().item())
    assert answer["group"]["std"] == pytest.approx(values.std().item())
    centred = subtract_baseline(values, torch.ones_like(values, dtype=torch.bool), baseline="group_mean")
    assert [item["advantage"] for item in answer["items"]] == pytest.approx(centred[0].tolist())  # Dr. GRPO


def test_rewards_that_judge_nothing_are_refused_before_a_token_is_drawn(export: Path) -> None:
    spec = {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {}}
    model = replace(find_model(export), rewards=[spec])
    unused: Any = None  # so that nothing can be drawn or scored
    route = EvaluateRoute(PolicyAPI(model).spec, RewardAPI(model).spec)
    body = EvaluateRequest.model_validate({"items": [{"problem": "1+1=", "answer": "2"}]})
    with pytest.raises(ApiError, match="do not say what a right answer is") as refused:
        asyncio.run(route.evaluate(body, unused))
    assert (refused.value.status, refused.value.code) == (400, "no_correctness")


def test_episodes_of_a_policy_without_a_verdict_are_refused_before_it_is_loaded(export: Path) -> None:
    spec = {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {}}
    model = replace(find_model(export), rewards=[spec], environment={"class_path": "nobody.looks", "init_args": {}})
    problems = [EvalProblem.model_validate({"problem": "1+1=", "answer": "2"})]
    with pytest.raises(ValueError, match="an evaluation needs a reward with `correctness: true`"):
        next(evaluate_whole(model, problems, Sampling(n=1), seed=0, device="cpu", max_rows=4))


def _held_out() -> list[dict[str, Any]]:
    return [{"id": 10 + i, "problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(11)]


def test_the_route_generates_scores_and_sums_up(server: Any, export: Path) -> None:
    answer = server.ask("/v1/evaluate", {"items": _held_out(), "n": 4, "seed": 3, "max_tokens": 20})
    assert [item["problem"] for item in answer["items"]] == [row["problem"] for row in _held_out()]
    for item in answer["items"]:
        assert len(item["samples"]) == 4
        for sample in item["samples"]:
            assert sample["completion"].startswith("<think>")
            assert 1 <= sample["tokens"] <= 20
            assert sample["finish_reason"] == "stop" or sample["tokens"] == 20
    assert set(answer["summary"]["metrics"]) == {"pass@1", "pass@2", "pass@4", "maj@4"}
    again = server.ask("/v1/evaluate", {"items": _held_out(), "n": 4, "seed": 3, "max_tokens": 20})
    assert [_texts(a) for a in again["items"]] == [_texts(a) for a in answer["items"]]


def _texts(item: dict[str, Any]) -> list[str]:
    return [sample["completion"] for sample in item["samples"]]


def test_the_command_draws_the_same_in_process_and_through_a_server(
    server: Any, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _held_out()))
    results, summaries = [], []
    for name, where in (("local", ["--model", str(export)]), ("remote", ["--server", server.address])):
        out = tmp_path / f"{name}.jsonl"
        options = ["--data", str(data), "-n", "3", "--seed", "5", "--max-completion-length=24", f"--output={out}"]
        assert main(["evaluate", *where, *options]) == 0
        results.append([json.loads(line) for line in out.read_text().splitlines()])
        printed = capsys.readouterr().out
        assert "pass@1" in printed
        summaries.append(json.loads(printed.splitlines()[-1]))
    assert [_texts(a) for a in results[0]] == [_texts(a) for a in results[1]]
    assert summaries[0] == summaries[1]
    assert summaries[0]["problems"] == 11


def test_the_command_reads_rows_as_training_does(server: Any, export: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1+1="}]
    rows = [
        {"id": 1, "question": "1+1=", "answer": 2},
        {"id": 1, "question": asked, "answer": "2"},
        {"id": 2, "question": "3+4=", "answer": ["7", "8"]},
    ]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    found = []
    for where in (["--model", str(export)], ["--server", server.address]):
        options = ["--data", str(data), "-n", "2", "--max-completion-length=16", f"--output={tmp_path / 'out.jsonl'}"]
        assert main(["evaluate", *where, *options]) == 0
        plain, turns, several = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        assert _texts(plain) == _texts(turns) and turns["problem"] == asked
        assert [sample["status"] for sample in several["samples"]] == ["bad_gold"] * 2
        assert [sample["correct"] for sample in several["samples"]] == [None, None]
        assert None not in [sample["correct"] for sample in (*plain["samples"], *turns["samples"])]
        found.append([_texts(row) for row in (plain, turns, several)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "problem", [[{"role": "tool", "content": "1"}], [], [{"role": "user", "content": "\ud83d"}], {"role": "user"}]
)
def test_a_conversation_that_cannot_be_asked_is_refused(server: Any, problem: Any) -> None:
    status, answer = server.post("/v1/evaluate", {"items": [{"problem": problem, "answer": "2"}]})
    assert status == 400 and answer["error"]["param"].startswith("items.0.problem")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data is missing"),
        (["--data", "DATA"], "either --model"),
        (["--data", "DATA", "--model", "x", "--server", "y"], "either --model"),
        (["--data", "DATA", "--server", "http://127.0.0.1:9"], "no server at"),
        (["--data", "BROKEN", "--server", "http://127.0.0.1:9"], "row 2 of 'BROKEN'"),
        (["--data", "DATA", "--model", "/nowhere"], "no such model"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DATA").write_text(json.dumps({"question": "1+1=", "answer": 2}) + "\n")
    Path("BROKEN").write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + '\n{"problem": "x"}\n')
    assert main(["evaluate", *options]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1]
