"""Rewards are called once before a run: faults are told in one line, and what they keep is that of before."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import (
    ColumnArithmeticReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    MathReward,
    PerSource,
    Reward,
    Score,
)
from grpo_pl.training import reward_probe
from grpo_pl.training.reward_probe import JUNK, probe_rewards
from tests.process_list import lives

SOURCE = ArithmeticPrompts(digits=2)
SEEN: list[list[str]] = []
COUNT = 0


def probe(tokenizer: PreTrainedTokenizerBase, *rewards: Reward, group_size: int = 2, plays: bool = False) -> list[str]:
    said: list[str] = []
    problems, template = SOURCE.prompts(0, count=2), PromptTemplate()
    probe_rewards(rewards, problems, SOURCE, template, tokenizer, group_size=group_size, plays=plays, say=said.append)
    return said


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def nan(completions: list[str], **columns: Any) -> list[float]:
    return [float("nan")] * len(completions)


def raising(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / 0 for _ in completions]


def lacking(completions: list[str], difficulty: list[str]) -> list[float]:
    return [0.0] * len(completions)


async def waiting(completions: list[str], **columns: Any) -> list[float]:
    return [2.0]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (short, "test_reward_probe.short' returned 1 values for 4 completions"),
        (nan, "test_reward_probe.nan' returned nan"),
        (raising, "ZeroDivisionError: float division by zero, raised by the reward function 'tests.training"),
        (lacking, "takes 'difficulty', and there is no such column; there are ['completion_length', 'prompt'"),
        (waiting, "returned 1 values for 4 completions"),
    ],
)
def test_a_fault_is_told_in_one_line_that_names_the_function(
    tokenizer: PreTrainedTokenizerBase, function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(ValueError, match=r"reward 'mine' failed before the start") as error:
        probe(tokenizer, FormatReward(), FunctionReward(name="mine", function=function))
    assert told in str(error.value) and "\n" not in str(error.value)


def counting(completions: list[str], **columns: Any) -> list[float]:
    global COUNT
    COUNT += 1
    SEEN.append(list(completions))
    return [random.random() for _ in completions]


@dataclass(kw_only=True)
class Remembering(Reward):
    name: str = "remembering"
    memory: list[int] = field(default_factory=list)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.memory.append(len(completions))
        return [Score(0.0, "wrong")] * len(completions)


def test_what_a_reward_keeps_is_that_of_before(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    total, lock, calls = 0, threading.Lock(), tmp_path / "calls"

    async def closed(completions: list[str], **columns: Any) -> list[float]:
        nonlocal total
        with lock:
            total += 1
        return [0.0] * len(completions)

    file = tmp_path / "mine.py"
    file.write_text(
        f"open({str(calls)!r}, 'a').write('i')\nn = []\ndef mark(completions):\n    n.append(1)\n"
        f"    open({str(calls)!r}, 'a').write('c')\n    return [float(len(n))] * len(completions)\n"
    )
    remembering, before = Remembering(), random.getstate()
    marked = FunctionReward(function=f"{file}:mark")
    functions = [FunctionReward(name=str(i), function=f) for i, f in enumerate((counting, closed))]
    assert probe(tokenizer, *functions, marked, PerSource(rewards={"": remembering})) == []
    assert (COUNT, SEEN, total, remembering.memory) == (0, [], 0, []) and random.getstate() == before
    assert calls.read_text() == "ic" and marked(["a"], ["1"], {})[0].value == 1.0  # the file ran once


def test_a_group_is_junk_and_right_answers_in_turn(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def noting(completions: list[str], **columns: Any) -> list[float]:
        (tmp_path / "texts").write_text(json.dumps(completions))
        return [0.0] * len(completions)

    first, second = SOURCE.prompts(0, count=2)
    assert probe(tokenizer, FunctionReward(name="noting", function=noting), group_size=3) == []
    texts = json.loads((tmp_path / "texts").read_text())
    assert texts == [JUNK, texts[1], JUNK, texts[3], JUNK, texts[3]]
    assert first.answer in texts[1] and second.answer in texts[3]


def stuck(completions: list[str], **columns: Any) -> list[float]:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(100.0)


async def stuck_coroutine(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(100.0)
    return []


@pytest.mark.parametrize("function", [stuck, stuck_coroutine])
def test_a_slow_function_is_not_waited_for(
    function: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.2)
    slow = FunctionReward(name="slow", function=function, on_error="none")
    interrupted, left_out = probe(tokenizer, slow, FormatReward())
    assert interrupted.startswith("reward 'slow' was interrupted: texts that try it took until 0.2 s had passed")
    assert "'format' on are not tried" in left_out


def test_a_process_that_dies_is_told_and_nothing_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    def crashing(completions: list[str], **columns: Any) -> list[float]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    (said,) = probe(tokenizer, FunctionReward(name="crashing", function=crashing))
    assert said == "reward 'crashing' has no result: the process that tried it ended by SIGKILL."


def test_what_fails_as_a_forked_process_has_no_gpu_is_no_fault(tokenizer: PreTrainedTokenizerBase) -> None:
    def on_gpu(completions: list[str], **columns: Any) -> list[float]:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, …")

    (said,) = probe(tokenizer, FunctionReward(name="on_gpu", function=on_gpu))
    assert said.startswith("reward 'on_gpu' is not tried before the start: it needs the GPU")


def test_the_traceback_of_the_forked_process_is_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="failed before the start") as caught:
        probe(tokenizer, FunctionReward(function=raising))
    assert "return [1.0 / 0 for _ in completions]" in str(caught.value.__cause__)


def test_workers_of_this_process_are_left_alone_by_the_one_that_tries_a_reward(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The reward of a mixture has workers, which a fork does not share."""
    mathematics = MathReward(workers=1)
    assert mathematics([r"\boxed{1+x}"], ["x+1"], {})[0].value == 1.0
    pids = mathematics.pool.pids
    mixed = PerSource(rewards={"a": mathematics, "b": FunctionReward(function=short)})
    columns = {"source": "a"}
    problems = [replace(problem, answer="x+1", columns=columns) for problem in SOURCE.prompts(0, count=2)]
    said: list[str] = []
    probe_rewards([mixed], problems, SOURCE, PromptTemplate(), tokenizer, group_size=2, plays=False, say=said.append)
    assert said == []
    assert mathematics.pool.pids == pids
    assert mathematics([r"\boxed{2+y}"], ["y+2"], {})[0].value == 1.0
    mathematics.close()


def test_programs_that_a_slow_function_started_end_with_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starting(completions: list[str], **columns: Any) -> list[float]:
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
        return []

    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.5)
    (said,) = probe(tokenizer, FunctionReward(name="slow", function=starting))
    assert said.startswith("reward 'slow' was interrupted")
    deadline = time.monotonic() + 10
    while lives(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_judge_that_does_not_answer_is_not_waited_for(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(JudgeReward, "__call__", lambda *_: answered.wait())
    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.2)
    (said,) = probe(tokenizer, JudgeReward(model="m", base_url="http://127.0.0.1:9", check_remote=True))
    answered.set()
    assert said == "reward 'judge' was not waited for: texts that try it took until 0.2 s had passed."


def test_process_rewards_and_episodes_get_junk_only_and_judges_nothing(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def asked(self: Any, completions: Sequence[str], answers: Sequence[str], columns: Any) -> list[Score]:
        counts.append(len(set(completions)))
        return [Score(0.0, "wrong")] * len(completions)

    for kind in (ColumnArithmeticReward, JudgeReward, FormatReward):
        monkeypatch.setattr(kind, "__call__", asked)
    judge = {"model": "m", "base_url": "http://127.0.0.1:9"}
    probe(tokenizer, FormatReward(), ColumnArithmeticReward(), JudgeReward(**judge))
    assert counts == [3, 1]  # different texts
    probe(tokenizer, JudgeReward(**judge, check_remote=True))
    probe(tokenizer, FormatReward(), plays=True)
    assert counts[2:] == [3, 1]
