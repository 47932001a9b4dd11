"""reasoning-gym's scorers in the sandbox: they know right from wrong and do nothing else."""

import base64
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_pl.rewards.base import Score
from grpo_pl.rewards.reasoning_gym import COLUMN, ReasoningGymReward

COSTLY = ("composite", "word_ladder")  # a task made of tasks, and one that fits no data set of three
SPREAD = ("chain_sum", "countdown", "graph_color", "gsm_symbolic", "n_queens", "rush_hour", "simple_integration")


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    reward = ReasoningGymReward(workers=1)
    yield reward
    reward.close()


def _entry(task: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    entry = reasoning_gym.create_dataset(task, size=2, seed=5, **settings)[1]
    return base64.b64encode(pickle.dumps((task, settings, entry))).decode(), entry


def _scores(reward: ReasoningGymReward, task: str, answers: Sequence[str]) -> list[Score]:
    packed, _ = _entry(task)
    completions = [f"<answer>{answer}</answer>" for answer in answers]
    return reward(completions, [""] * len(answers), {COLUMN: [packed] * len(answers)})


@pytest.mark.parametrize("task", SPREAD)
def test_right_answers_are_right_and_nonsense_is_not(reward: ReasoningGymReward, task: str) -> None:
    packed, entry = _entry(task)
    nonsense, right = reward(
        ["<answer>#</answer>", f"<answer>{entry['answer']}</answer>"], [""] * 2, {COLUMN: [packed] * 2}
    )
    assert nonsense.value is not None
    assert nonsense.value < 0.5
    if entry["answer"] is not None:
        assert (right.value, right.status) == (1.0, "ok")


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(COSTLY)))
def test_every_task_scores_its_own_answer(reward: ReasoningGymReward, task: str) -> None:
    packed, entry = _entry(task)
    if entry["answer"] is None:
        pytest.skip("the task names no answer")
    (score,) = reward([f"<answer>{entry['answer']}</answer>"], [""], {COLUMN: [packed]})
    assert score.value == 1.0, score


def test_another_expression_than_the_one_in_the_entry_is_right_as_well(reward: ReasoningGymReward) -> None:
    entry = {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}
    packed = base64.b64encode(pickle.dumps(("countdown", {}, entry))).decode()
    scores = reward([r"\boxed{2+1}", r"\boxed{3}", "?"], [""] * 3, {COLUMN: [packed] * 3})
    assert [score.value for score in scores] == [1.0, 0.05, 0.0]
    assert [score.status for score in scores] == ["ok", "wrong", "no_answer"]
    strict = ReasoningGymReward(workers=1, partial=False)
    assert [score.value for score in strict([r"\boxed{2+1}", r"\boxed{3}"], [""] * 2, {COLUMN: [packed] * 2})] == [1, 0]


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {file}')",
        "open('{file}', 'w')",
        "eval(chr(49))",
        "(eval)((chr)(49))",
        "().__class__.__base__.__subclasses__()",
        "ｏｐｅｎ(1)",
        "[__import__('os').system('touch {file}')]",
        "9**9**9**9",
    ],
)
@pytest.mark.parametrize("task", ["countdown", "n_queens", "puzzle24", "polynomial_multiplication"])
def test_an_answer_that_is_code_does_nothing(
    reward: ReasoningGymReward, task: str, attack: str, tmp_path: Path
) -> None:
    file = tmp_path / "touched"
    (score,) = _scores(reward, task, [attack.replace("{file}", str(file))])
    assert score.value is not None
    assert score.value < 0.5
    assert not file.exists()


def test_what_slips_past_the_grammar_meets_the_audit_hook(tmp_path: Path) -> None:
    from grpo_pl.rewards.crew import SandboxSettings
    from grpo_pl.rewards.sandbox import WorkerPool

    file = tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(file), "w"))

    pool = WorkerPool(SandboxSettings(workers=1, judge="gym_judge.py"))
    (verdict,) = pool.run([(base64.b64encode(pickle.dumps(Touch())).decode(), "1")])
    pool.close()
    assert "PermissionError" in verdict.detail
    assert not file.exists()


def test_problems_of_another_source_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"scores problems of .*ReasoningGymPrompts only"):
        ReasoningGymReward()(["x"], ["1"], {"prompt": ["?"]})
