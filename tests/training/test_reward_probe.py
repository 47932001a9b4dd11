"""Rewards are called once before a run: faults are told in one line, and what they keep is that of before."""

import asyncio
import pickle
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ColumnArithmeticReward, FormatReward, FunctionReward, JudgeReward, PerSource, Reward, Score
from grpo_pl.training import reward_probe
from grpo_pl.training.reward_probe import JUNK, probe_rewards

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


class Callable_:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [0.0] * len(completions)


@dataclass(kw_only=True)
class Remembering(Reward):
    name: str = "remembering"
    memory: list[int] = field(default_factory=list)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.memory.append(len(completions))
        return [Score(0.0, "wrong")] * len(completions)


def test_what_a_reward_keeps_is_that_of_before(tokenizer: PreTrainedTokenizerBase) -> None:
    total = 0

    def closed(completions: list[str], **columns: Any) -> list[float]:
        nonlocal total
        total += 1
        return [0.0] * len(completions)

    counter, remembering, seen = Callable_(), Remembering(), SEEN
    random.seed(3)
    before = random.getstate()
    functions = [FunctionReward(name=str(i), function=f) for i, f in enumerate((counting, closed, counter))]
    assert probe(tokenizer, *functions, remembering) == []
    assert (COUNT, seen, total, counter.calls, remembering.memory) == (0, [], 0, 0, [])
    assert SEEN is seen and random.getstate() == before


FILE = """
from tests.training.test_reward_probe import RUNS
RUNS.append(__name__)

class Stats:
    total, seen = 0, []
    def __init__(self):
        self.calls = 0

class Score:
    def __init__(self):
        self.calls = 0
    def __call__(self, completions, **columns):
        self.calls += 1
        return helper(completions)

MISSING, stats, score = object(), Stats(), Score()
alias = stats

def helper(completions):
    Stats.total += 1
    Stats.fresh = 1
    Stats.seen.append(1)
    return [0.0] * len(completions)

def mark(completions, seen=[], *, more={}, unset=MISSING, **columns):
    assert stats is alias and unset is MISSING
    global lazy
    lazy = 1
    stats.calls += 1
    mark.calls = 1
    seen.append(1)
    more[len(more)] = 1
    return helper(completions)
"""
RUNS: list[str] = []


def _of_file(folder: Path, name: str) -> tuple[FunctionReward, Any]:
    """The reward of ``name`` in a file, and its module."""
    (folder / "mine.py").write_text(FILE)
    RUNS.clear()
    reward = FunctionReward(function=f"{folder / 'mine.py'}:{name}")
    return reward, sys.modules[RUNS[0]]


def test_a_function_in_a_file_stays_as_it_is(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    reward, module = _of_file(tmp_path, "mark")
    stats, called = module.stats, module.mark
    assert probe(tokenizer, reward) == [] and len(RUNS) == 1  # the file ran once
    assert sys.modules[RUNS[0]] is module and pickle.loads(pickle.dumps(module.helper)) is module.helper
    assert module.stats is module.alias is stats and stats.calls == 0 and not hasattr(module, "lazy")
    assert called.__defaults__ == ([],) and called.__kwdefaults__["more"] == {} and vars(called) == {}
    assert (module.Stats.total, module.Stats.seen, hasattr(module.Stats, "fresh")) == (0, [], False)
    reward(["a"], ["1"], {})
    assert (stats.calls, module.lazy, called.__defaults__, module.Stats.seen) == (1, 1, ([1],), [1])


def test_an_instance_that_is_named_stays_as_it_is(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    reward, module = _of_file(tmp_path, "score")
    assert probe(tokenizer, reward) == [] and len(RUNS) == 1
    assert (module.score.calls, module.Stats.total, module.Stats.seen) == (0, 0, [])
    reward(["a"], ["1"], {})
    assert (module.score.calls, module.Stats.total) == (1, 1)


class Stays(list):  # type: ignore[type-arg]
    def __deepcopy__(self, memo: Any) -> Any:
        return self


def test_a_group_is_junk_and_right_answers_in_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = Stays()

    def noting(completions: list[str], **columns: Any) -> list[float]:
        texts.extend(completions)
        return [0.0] * len(completions)

    first, second = SOURCE.prompts(0, count=2)
    probe(tokenizer, FunctionReward(name="noting", function=noting), group_size=3)
    assert texts == [JUNK, texts[1], JUNK, texts[3], JUNK, texts[3]]
    assert first.answer in texts[1] and second.answer in texts[3]


def test_a_copy_of_a_users_class_is_not_closed(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    class Closing(Remembering):
        def close(self) -> None:
            tmp_path.rmdir()

    assert probe(tokenizer, Closing(), PerSource(rewards={"": Closing()})) == [] and tmp_path.exists()


def test_a_slow_coroutine_is_cancelled_and_undone(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, active = Stays(), [0]

    async def slow(completions: list[str], **columns: Any) -> list[float]:
        active[0] += 1
        try:
            await asyncio.sleep(100.0)
        finally:
            active[0] -= 1
            ended.append(active[0])
        return [0.0] * len(completions)

    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.2)
    (said,) = probe(tokenizer, FunctionReward(name="slow", function=slow, on_error="none"))
    assert said.startswith("reward 'slow' was interrupted: 4 texts") and ended == [0] and active == [0]


def test_copying_is_interrupted_as_well(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __deepcopy__(self, memo: Any) -> Any:
            time.sleep(100.0)

    kept = Slow()

    def using(completions: list[str], **columns: Any) -> list[float]:
        return [0.0 if kept else 1.0] * len(completions)

    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.2)
    (said,) = probe(tokenizer, FunctionReward(name="using", function=using))
    assert said.startswith("reward 'using' was interrupted")


def test_a_state_that_cannot_be_copied_is_not_touched(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = (line for line in ("a", "b"))

    def reading(completions: list[str], **columns: Any) -> list[float]:
        next(lines)
        return [0.0] * len(completions)

    (said,) = probe(tokenizer, FunctionReward(name="reading", function=reading))
    assert "'reading' is not tried before the start" in said and next(lines) == "a"


def test_a_slow_function_is_not_waited_for(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(completions: list[str], **columns: Any) -> list[float]:
        try:
            time.sleep(100.0)
        except Exception:
            time.sleep(100.0)
        return [0.0] * len(completions)

    monkeypatch.setattr(reward_probe, "LIMIT_S", 0.2)
    said = probe(tokenizer, FunctionReward(name="slow", function=slow), FormatReward())
    assert (
        said[0].startswith("reward 'slow' was interrupted: 4 texts that try it took more than 0 s")
        and "'format' on are not tried" in said[1]
    )


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
