"""Rewards are called once before a run: faults are told in one line, and what they keep is that of before."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ColumnArithmeticReward, FormatReward, FunctionReward, JudgeReward, Reward, Score
from grpo_pl.training import reward_probe
from grpo_pl.training.reward_probe import JUNK, probe_rewards

SOURCE = ArithmeticPrompts(digits=2)
SEEN: list[list[str]] = []
COUNT = 0


def probe(tokenizer: PreTrainedTokenizerBase, *rewards: Reward, plays: bool = False) -> list[str]:
    said: list[str] = []
    problems = SOURCE.prompts(0, count=2)
    probe_rewards(rewards, problems, SOURCE, PromptTemplate(), tokenizer, plays=plays, say=said.append)
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


def test_each_problem_gets_junk_and_a_right_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    texts: list[list[str]] = []

    def noting(completions: list[str], **columns: Any) -> list[float]:
        place.extend(completions)
        return [0.0] * len(completions)

    class Place(list):  # type: ignore[type-arg]
        def __deepcopy__(self, memo: Any) -> Any:
            return self  # so that it stays

        def clear(self) -> None:
            texts.append(list(self))

    place = Place()
    probe(tokenizer, FunctionReward(name="noting", function=noting))
    first, second = SOURCE.prompts(0, count=2)
    junk, right, *others = texts[-1][:4]
    assert junk == others[0] == JUNK
    assert right == rf"\boxed{{{first.answer}}}" or first.answer in right
    assert second.answer in others[1]


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
    assert said[0].startswith("reward 'slow' took more than") and "'format' on are not tried" in said[1]


def test_process_rewards_and_episodes_get_junk_only_and_judges_nothing(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def asked(self: Any, completions: Sequence[str], answers: Sequence[str], columns: Any) -> list[Score]:
        counts.append(len(completions))
        return [Score(0.0, "wrong")] * len(completions)

    for kind in (ColumnArithmeticReward, JudgeReward, FormatReward):
        monkeypatch.setattr(kind, "__call__", asked)
    judge = {"model": "m", "base_url": "http://127.0.0.1:9"}
    probe(tokenizer, FormatReward(), ColumnArithmeticReward(), JudgeReward(**judge))
    assert counts == [4, 2]
    probe(tokenizer, JudgeReward(**judge, check_remote=True))
    probe(tokenizer, FormatReward(), plays=True)
    assert counts[2:] == [4, 2]
