"""What every reward has from ``Reward`` and ``PerCompletionReward``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.config.objects import build
from grpo_pl.rewards import ExactReward, FunctionReward, LengthReward, MathReward, PerSource, Reward, Score
from grpo_pl.rewards.base import PerCompletionReward, correctness_index, needs_of, require_correctness
from grpo_pl.rewards.golds import check_golds


@dataclass(kw_only=True)
class Length(PerCompletionReward):
    name: str = "length"
    least: int = 0
    calls: list[str] = field(default_factory=list, init=False)
    held: list[dict[str, Reward]] = field(default_factory=list)

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold else "empty" for gold in golds]

    def score(self, completion: str, gold: str) -> Score:
        return Score(float(len(completion) - len(gold) - self.least), "ok")

    def start(self) -> None:
        self.calls.append("start")

    def close(self) -> None:
        self.calls.append("close")


def test_weight_and_correctness_are_arguments_of_every_reward() -> None:
    reward = Length(weight=0.5, correctness=True, least=1)
    assert reward.init_args() == {"name": "length", "weight": 0.5, "correctness": True, "least": 1, "held": []}
    assert (Length().weight, Length().correctness, Length().on_error) == (1.0, False, "raise")


class Plain(Reward):
    name = "plain"
    weight = 0.25

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(float(self.text in completion), "ok") for completion in completions]


def test_a_reward_that_is_no_dataclass_keeps_its_own_constructor_and_values() -> None:
    reward = Plain("a")
    assert (reward.name, reward.weight, reward.correctness, reward.on_error) == ("plain", 0.25, False, "raise")
    assert reward(["abc"], [""], {})[0].value == 1.0
    assert len({reward, Plain("b")}) == 2
    with pytest.raises(TypeError, match="Plain is not a dataclass"):
        reward.init_args()


def test_a_gold_answer_with_a_fault_leaves_its_completion_without_a_value() -> None:
    scores = Length()(["abc", "abc"], ["a", ""], {})
    assert scores == [Score(2.0, "ok"), Score(None, "bad_gold", "empty")]


def test_rewards_inside_a_reward_are_started_and_closed_with_it() -> None:
    inner = Length()
    outer = PerSource(rewards={"a": LengthReward(shape="cosine", correct=inner), "b": ExactReward()})
    outer.start()
    outer.close()
    assert inner.calls == ["start", "close"]


def test_the_correctness_reward_is_found_by_its_mark() -> None:
    assert correctness_index([ExactReward(), Length(correctness=True)]) == 1
    assert correctness_index([Length()]) is None
    with pytest.raises(ValueError, match="an evaluation needs a reward with `correctness: true`"):
        require_correctness([Length()], "an evaluation")


FUNCTIONS = """
def texts(completions): return [0.0] * len(completions)
def tokens(completions, completion_ids): return [0.0] * len(completions)
def lengths(completions, *, completion_length=None): return [0.0] * len(completions)
def anything(completions, **kwargs): return [0.0] * len(completions)
"""


def test_a_reward_says_which_costly_columns_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    named = {name: FunctionReward(function=f"{file}:{name}") for name in ("texts", "tokens", "lengths", "anything")}
    assert {name: set(reward.needs) for name, reward in named.items()} == {
        "texts": set(),
        "tokens": {"completion_ids"},
        "lengths": {"completion_length"},
        "anything": {"completion_ids", "completion_length"},
    }
    assert ExactReward().needs == Plain().needs == needs_of([]) == frozenset()
    assert LengthReward().needs == {"completion_length"}
    assert needs_of([LengthReward(), named["tokens"]]) == {"completion_ids", "completion_length"}
    tokens = named["tokens"]  # and what it needs, those need that hold it
    assert PerSource(rewards={"a": ExactReward(), "b": tokens}).needs == {"completion_ids"}
    assert LengthReward(shape="cosine", correct=tokens).needs == {"completion_ids", "completion_length"}
    assert Length(held=[{"a": PerSource(rewards={"x": LengthReward()})}]).needs == {"completion_length"}


def test_what_an_earlier_version_kept_is_not_in_the_way(reward: MathReward, tmp_path: Path) -> None:
    bad = check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    (tmp_path / kept.name.replace("faults-", "golds-")).write_text("[]")  # a list, until the files became objects
    assert [gold.row for gold in bad] == [1]
    assert check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path) == bad
    kept.unlink()
    assert check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path) == bad


# --- a reward for each source of a mixture ---


def test_every_completion_is_judged_by_the_rule_of_its_source(reward: MathReward) -> None:
    each = PerSource(correctness=True, rewards={"text": ExactReward(), "numbers": reward})
    completions = [r"\boxed{1/2}", r"\boxed{1/2}", r"\boxed{7}"]
    scores = each(completions, ["0.5", "0.5", "7"], {"source": ["text", "numbers", "text"]})
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]


def test_a_source_without_a_rule_is_refused() -> None:
    reward = PerSource(rewards={"a": ExactReward()})
    with pytest.raises(ValueError, match=r"no reward for the source 'b': .* one of 'a'"):
        reward(["x"], ["y"], {"source": ["b"]})
    with pytest.raises(ValueError, match="has no `rewards`"):
        PerSource()


def test_an_export_rebuilds_it() -> None:
    length = LengthReward(shape="cosine", correct=ExactReward())
    reward = PerSource(name="right", correctness=True, rewards={"a": length, "b": MathReward(workers=1)})
    assert build(Reward, reward.spec(), "reward") == reward
