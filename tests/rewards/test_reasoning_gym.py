"""reasoning-gym's scorers in the sandbox: they know right from wrong and do nothing else."""

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_pl.data.tasks.reasoning_gym import ReasoningGymPrompts
from grpo_pl.rewards.base import MissingColumn, Score
from grpo_pl.rewards.reasoning_gym import COLUMN, ReasoningGymReward
from grpo_pl.rewards.sandbox.gym_entry import GymProblem, pack, unpack

SPREAD = ("chain_sum", "countdown", "graph_color", "gsm_symbolic", "n_queens", "rush_hour", "simple_integration")


def _entry(task: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    entry = reasoning_gym.create_dataset(task, size=2, seed=5, **settings)[1]
    return pack(GymProblem(task, settings, entry)), entry


def _scores(gym: ReasoningGymReward, task: str, answers: Sequence[str]) -> list[Score]:
    packed, _ = _entry(task)
    completions = [f"<answer>{answer}</answer>" for answer in answers]
    return gym(completions, [""] * len(answers), {COLUMN: [packed] * len(answers)})


@pytest.mark.parametrize("task", SPREAD)
def test_right_answers_are_right_and_nonsense_is_not(gym: ReasoningGymReward, task: str) -> None:
    packed, entry = _entry(task)
    nonsense, right = gym(
        ["<answer>#</answer>", f"<answer>{entry['answer']}</answer>"], [""] * 2, {COLUMN: [packed] * 2}
    )
    assert nonsense.value is not None
    assert nonsense.value < 0.5
    if entry["answer"] is not None:
        assert (right.value, right.status) == (1.0, "ok")


def test_another_expression_than_the_one_in_the_entry_is_right_as_well(gym: ReasoningGymReward) -> None:
    packed = pack(GymProblem("countdown", {}, {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}))
    scores = gym([r"\boxed{2+1}", r"\boxed{3}", "?"], [""] * 3, {COLUMN: [packed] * 3})
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]
    assert [score.status for score in scores] == ["ok", "wrong", "no_answer"]


def test_part_of_the_value_is_paid_above_what_constants_earn_and_only_if_wanted(gym: ReasoningGymReward) -> None:
    entry = {"question": "Sort: d, b, a, c", "answer": "a, b, c, d", "metadata": {"sorted_words": list("abcd")}}
    packed = pack(GymProblem("word_sorting", {}, entry))
    completions = [r"\boxed{a,b,c,d}", r"\boxed{a,b,d,c}", r"\boxed{0}"]
    assert [score.value for score in gym(completions, [""] * 3, {COLUMN: [packed] * 3})] == [1.0, 0.5, 0.0]
    strict = ReasoningGymReward(workers=1, partial=False)
    assert [score.value for score in strict(completions, [""] * 3, {COLUMN: [packed] * 3})] == [1.0, 0.0, 0.0]


ATTACKS = [
    "__import__('os').system('touch {file}')", "open('{file}', 'w')", "eval(chr(49))", "(eval)((chr)(49))",
    "().__class__.__base__.__subclasses__()", "ｏｐｅｎ(1)", "[__import__('os').system('touch {file}')]",
]  # fmt: skip


@pytest.mark.parametrize("task", ["countdown", "n_queens", "puzzle24", "polynomial_multiplication"])
def test_an_answer_that_is_code_does_nothing(gym: ReasoningGymReward, task: str, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    attacks = [*ATTACKS, "9**9**9**9"] if task == "countdown" else ATTACKS
    scores = _scores(gym, task, [attack.replace("{file}", str(file)) for attack in attacks])
    assert [score for score in scores if score.value is None or score.value >= 0.5] == []
    assert not file.exists()


def test_what_slips_past_the_grammar_meets_the_audit_hook(tmp_path: Path) -> None:
    """A worker whose judge is set up like reasoning-gym's, with a scorer that opens a file for writing."""
    import subprocess
    import sys

    file = tmp_path / "touched"
    program = f"from grpo_pl.rewards.sandbox import gym_judge; gym_judge.prepare()\nopen({str(file)!r}, 'w')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "PermissionError: a scorer tried open" in done.stderr
    assert not file.exists()


CODE_IN_ENTRIES = {
    "bitwise_arithmetic": {"answer": "1", "metadata": {"problem": "{code}"}},
    "number_sorting": {"answer": "{code}", "metadata": {"direction": "ascending"}},
    "polynomial_multiplication": {"answer": "{code}", "metadata": {}},
    "simple_integration": {"answer": "x", "metadata": {"variable": "x", "integrand": "{code}"}},
}
CODE = ("__import__('os').kill(__import__('os').getpid(), 9)", "(0).__class__.__base__.__subclasses__()", "exit()")


@pytest.mark.parametrize("task", CODE_IN_ENTRIES)
def test_an_entry_that_holds_code_does_nothing(gym: ReasoningGymReward, task: str) -> None:
    entries = [json.loads(json.dumps(CODE_IN_ENTRIES[task]).replace("{code}", code)) for code in CODE]
    answer = r"\boxed{[1]}" if task == "number_sorting" else r"\boxed{1}"
    problems = [pack(GymProblem(task, {}, entry)) for entry in entries]
    assert {score.status for score in gym([answer] * 3, [""] * 3, {COLUMN: problems})} == {"wrong"}


def test_bitwise_problems_are_still_calculated(gym: ReasoningGymReward) -> None:
    packed = pack(
        GymProblem("bitwise_arithmetic", {}, {"answer": "0x6", "metadata": {"problem": "(0x1 << 0x2) + 0x2"}})
    )
    scores = gym([r"\boxed{0x6}", r"\boxed{0x7}"], [""] * 2, {COLUMN: [packed] * 2})
    assert [score.value for score in scores] == [1.0, 0.0]


class _Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.file), "w"))


def _cells(file: Path) -> dict[str, Any]:
    entry = {"question": "?", "answer": "1", "metadata": {}}
    good = {"task": "chain_sum", "settings": {}, "entry": entry}
    return {
        "pickle": base64.b64encode(pickle.dumps(_Bomb(file))).decode(),
        "old pickle": base64.b64encode(pickle.dumps(("chain_sum", {}, entry))).decode(),
        "bytes": pickle.dumps(_Bomb(file)),
        "object": good,
        "number": 5,
        "list": json.dumps([1]),
        "unknown task": json.dumps({**good, "task": "os.system"}),
        "task of another type": json.dumps({**good, "task": ["chain_sum"]}),
        "unknown setting": json.dumps({**good, "settings": {"path": "/etc/passwd"}}),
        "seed": json.dumps({**good, "settings": {"seed": 3}}),
        "entry of another type": json.dumps({**good, "entry": "1"}),
        "answer of another type": json.dumps({**good, "entry": {**entry, "answer": {"a": 1}}}),
        "further keys": json.dumps({**good, "code": "1"}),
        "task of tasks": json.dumps({**good, "task": "composite"}),
        "too long": json.dumps({**good, "entry": {**entry, "question": "x" * 1_000_000}}),
        "nested": "[" * 100_000,
        "nan": json.dumps({**good, "settings": {"min_terms": float("nan")}}),
        "huge number": '{"task": ' + "9" * 5000 + "}",
    }


@pytest.mark.parametrize("kind", _cells(Path()))
def test_what_no_source_of_ours_wrote_is_refused_and_does_nothing(
    gym: ReasoningGymReward, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "touched"
    with pytest.raises(MissingColumn, match="the column 'reasoning_gym'"):
        gym([r"\boxed{1}"], [""], {COLUMN: [_cells(file)[kind]]})
    assert not file.exists()


def test_settings_that_reasoning_gym_refuses_are_not_the_fault_of_the_completion(gym: ReasoningGymReward) -> None:
    entry = {"question": "?", "answer": "1", "metadata": {}}
    packed = pack(GymProblem("chain_sum", {"min_terms": 5, "max_terms": 2}, entry))
    (score,) = gym([r"\boxed{1}"], [""], {COLUMN: [packed]})
    assert (score.value, score.status) == (None, "bad_gold")


@pytest.mark.parametrize(
    "task",
    [*SPREAD, *(pytest.param(task, marks=pytest.mark.slow) for task in sorted(set(DATASETS) - {*SPREAD, "composite"}))],
)
def test_every_entry_travels_unchanged(task: str) -> None:
    for entry, _ in zip(reasoning_gym.create_dataset(task, size=20, seed=5), range(3), strict=False):
        assert unpack(pack(GymProblem(task, {}, entry))) == (task, {}, entry)


def test_a_source_refuses_a_task_of_tasks() -> None:
    with pytest.raises(ValueError, match=r"'composite' of reasoning-gym is refused: .*MixturePrompts"):
        ReasoningGymPrompts(task="composite")


def test_problems_of_another_source_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"scores problems of .*ReasoningGymPrompts only"):
        ReasoningGymReward()(["x"], ["1"], {"prompt": ["?"]})
