"""What holds for every reward and judge: no text makes it raise, and none makes it slow."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_pl.extras.watch.skeletons import forms_of
from grpo_pl.rewards import ExactReward, Reward, Score
from grpo_pl.rewards.answer_reading import json_field, last_number, read_anywhere
from grpo_pl.rewards.mathematics.units import split_unit
from grpo_pl.rewards.mathematics.written_numbers import is_worked_out, read_number
from tests.rewards.endpoint import Endpoint
from tests.rewards.shipped import NAMES, make
from tests.rewards.tiny_models import save_tiny

PATTERNS = [
    " ", "\n", "~", "7", "42,", "1 111 ", "- ", "a ", "aП", "{", "}", "(", "^", "$", "```", "\\", "\\[", "\\(",
    "\\boxed", "\\boxed{", "\\boxed{1}", "\\frac{", "\\text{", "<think>", "<answer>", "</answer>", "1/", ". ",
    "\u0301\u0316", "0",
]  # fmt: skip
"""Each of these, written over and over, was quadratic in some rule once, or might be."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of an endpoint that finds everything different."""
    server = Endpoint()
    server.behave = lambda handler, request: handler.say("DIFFERENT")
    yield server.url
    server.die()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A tiny sequence classifier and a tiny token classifier, one token per character."""
    heads = ("LlamaForSequenceClassification", "LlamaForTokenClassification")
    return {head: save_tiny(tmp_path_factory.mktemp(head), head, width=8, num_labels=2) for head in heads}


@pytest.fixture(scope="module")
def rewards(
    url: str, models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Reward]]:
    """Every reward of the package in every form, by its name."""
    file = tmp_path_factory.mktemp("function") / "own.py"
    file.write_text("def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n")
    needed: dict[str, dict[str, Any]] = {
        "MathReward": {"workers": 1},
        "ReasoningGymReward": {"workers": 1},
        "CodeReward": {"workers": 1, "isolation": "available"},
        "FunctionReward": {"function": f"{file}:length"},
        "JudgeReward": {"model": "m", "base_url": url},
        "RubricReward": {
            "model": "m", "base_url": url, "criteria": {"It is short.": 1.0}, "cache_file": f"{file}.sqlite",
        },
        "ModelReward": {"model": str(models["LlamaForSequenceClassification"]), "max_length": 64},
        "ProcessModelReward": {"model": str(models["LlamaForTokenClassification"]), "max_length": 256},
        "PerSource": {"rewards": {"a": ExactReward()}},
    }  # fmt: skip
    made = {name: make(name, **needed.get(name.partition(" ")[0], {})) for name in NAMES}
    yield made
    for reward in made.values():
        reward.close()


@pytest.fixture(scope="module")
def problem() -> str:
    """A cell of the column that ``ReasoningGymReward`` reads."""
    pytest.importorskip("reasoning_gym")
    from grpo_pl.data.tasks.reasoning_gym import ReasoningGymPrompts
    from grpo_pl.rewards.reasoning_gym import COLUMN

    (prompt,) = ReasoningGymPrompts(task="chain_sum").prompts(0, count=1)
    return str(prompt.columns[COLUMN])


def _score(reward: Reward, completions: Sequence[str], golds: Sequence[str], problem: str) -> list[Score]:
    count = len(completions)
    columns: dict[str, list[Any]] = {
        "prompt": ["12+3="] * count,
        "question": ["12+3="] * count,
        "completion_length": [len(text) for text in completions],
        "completion_ids": [[1]] * count,
        "reasoning_gym": [problem] * count,
        "source": ["a"] * count,
        "numbers": [[12, 3]] * count,
        "episode": [{"return": 0.5, "status": "ok", "turns": [{"reward": 0.5}]}] * count,
    }
    return reward(completions, golds, columns)


# --- odd texts --------------------------------------------------------------------------------------------------------

PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "\\boxed", "}", "{", "\\", " ", "\n", "7", "-", ",",
    ".", "/", "632", "12+3=15", "2+3+0=5\n", "\\frac{1}{0}", "\\frac", "\\text{", "1e999", "nan", "inf", "½", "²",
    "\u0663", "\uff15", "\U0001d7d3", "\x00", "\ud800", "\u200b", "\u202e", "\u2028", "\x1c", "aП", "和", "é",
    "\u02bc", "$", "$$", "\\[", "\\(", "```", "^", "_", "yes", "no", "None", "()", "[]", "7" * 5000, "1," * 60,
    "[" * 60, "x" * 1200,
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.text(max_size=40))


@pytest.mark.parametrize("name", NAMES)
def test_no_text_ends_a_run(name: str, rewards: Mapping[str, Reward], problem: str) -> None:
    """One score per completion, a finite number or none with its reason, whatever the policy or the data holds."""
    reward = rewards[name]

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(TEXTS, TEXTS), max_size=4))
    def check(rows: list[tuple[str, str]]) -> None:
        completions, golds = [row[0] for row in rows], [row[1] for row in rows]
        scores = _score(reward, completions, golds, problem)
        assert len(scores) == len(rows)
        for completion, score in zip(completions, scores, strict=True):
            if score.value is None:
                assert score.status in ("bad_gold", "unavailable")
            else:
                assert math.isfinite(score.value)
            if score.steps is not None:
                assert all(end <= len(completion) for end in score.steps.ends)
            json.dumps([score.value, score.status, score.detail]).encode()
        assert len(reward.gold_faults(golds)) == len(golds)

    check()


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{632} \\boxed", "\\boxed{632} \\boxed{", f"\\boxed{{{'7' * 4301}}}", "7" * 4301,
        f"\\boxed{{{'7' * 4301}}}\\boxed{{632}}", f"\\frac{{{'7' * 4301}}}{{2}}", "\\boxed{" * 5000,
        "\\boxed{\u0663\u0664 ²}", "\ud800",
    ],
)  # fmt: skip
def test_texts_that_ended_runs(completion: str, rewards: Mapping[str, Reward], problem: str) -> None:
    for name, reward in rewards.items():
        for gold in ("632", "12 34", completion):
            (score,) = _score(reward, [completion], [gold], problem)
            assert score.value is None or math.isfinite(score.value), name


# --- growth -----------------------------------------------------------------------------------------------------------


def _texts(pattern: str, length: int) -> tuple[list[str], list[str]]:
    """Completions with ``length`` characters of ``pattern``, bare, boxed and before an answer, and gold answers."""
    grown = (pattern * length)[:length]
    completions = [grown, f"x{grown}\\boxed{{{grown}}}", f"<think>{grown}</think>{grown}<answer>\\boxed{{5}}</answer>"]
    return [*completions, completions[1]], ["5", "x+1", "5", grown]


def _seconds(work: Callable[[], object]) -> float:
    """CPU time of this process: what other processes of the machine do does not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def _grows_too_fast(work: Callable[[int], object]) -> float | None:
    """How much longer 20,000 characters take than 2,000, if that is far more than ten times; a quadratic rule takes
    a hundred times. What takes less than 2 ms is not told apart from nothing; three attempts rule accidents out."""
    factors = []
    for _ in range(3):
        short, long = (_seconds(lambda size=size: work(size)) for size in (2_000, 20_000))  # type: ignore[misc]
        factors.append(long / max(short, 0.002))
        if factors[-1] < 40:
            return None
    return min(factors)


@pytest.mark.parametrize("name", [name for name in NAMES if " " not in name])
def test_time_grows_with_the_length_of_a_text_and_not_with_its_square(
    name: str, rewards: Mapping[str, Reward], problem: str
) -> None:
    reward = rewards[name]
    _score(reward, ["warm"], ["5"], problem)
    too_fast = {}
    # tokenizers and requests are linear, and slow: what is ours beside them cuts lines and escapes characters
    slow = ("ModelReward", "ProcessModelReward", "RubricReward")
    for pattern in ("\n", "7", "{", "\u0301\u0316") if name in slow else PATTERNS:

        def work(length: int, pattern: str = pattern) -> None:
            _score(reward, *_texts(pattern, length), problem)

        if factor := _grows_too_fast(work):
            too_fast[pattern] = round(factor)
    assert not too_fast


@pytest.mark.parametrize("read", [read_number, is_worked_out, split_unit])
@pytest.mark.parametrize("before", ["", "1", "-", "1/", "11 ", "10^"])
def test_answers_are_read_in_linear_time_and_never_raise(read: Callable[[str], object], before: str) -> None:
    texts = [lambda n, p=p, e=e: f"{before}{(p * n)[:n]}{e}" for p in (" ", "7", "1 ", ",111") for e in ("", "x", "/3")]  # type: ignore[misc]
    assert [text(8) for text in texts if _grows_too_fast(lambda n, text=text: read(text(n)))] == []  # type: ignore[misc]


@pytest.mark.parametrize("read", [last_number, read_anywhere, lambda text: json_field(text, "a")])
def test_answers_are_found_in_linear_time(read: Callable[[str], object]) -> None:
    texts = [*PATTERNS, '{"', '{"a":', '{"a":[0,', '{"a":"', "{ ", "1,", "1.", "1^{", "1**", "-", "$", "²", "1e", "x.1"]
    assert [p for p in texts if _grows_too_fast(lambda n, p=p: read("1" + (p * n)[:n]))] == []  # type: ignore[misc]


def test_forms_take_linear_time() -> None:
    assert [p for p in PATTERNS if _grows_too_fast(lambda n, p=p: forms_of((p * n)[:n] + "!"))] == []  # type: ignore[misc]
