from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_pl.rewards import ExactReward, FunctionReward, LengthReward, PerSource, Reward, Score
from grpo_pl.rewards.base import needs_of

FUNCTIONS = """
def texts(completions): return [0.0] * len(completions)
def tokens(completions, completion_ids): return [0.0] * len(completions)
def lengths(completions, *, completion_length=None): return [0.0] * len(completions)
def anything(completions, **kwargs): return [0.0] * len(completions)
"""


@dataclass(kw_only=True)
class Nested(Reward):
    name: str = "nested"
    parts: list[dict[str, Reward]]

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(0.0, "ok")] * len(completions)


class Plain(Reward):
    name = "plain"

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(0.0, "ok")] * len(completions)


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


def test_a_reward_needs_what_the_rewards_inside_it_need(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    tokens = FunctionReward(function=f"{file}:tokens")
    assert PerSource(rewards={"a": ExactReward(), "b": tokens}).needs == {"completion_ids"}
    assert LengthReward(shape="cosine", correct=tokens).needs == {"completion_ids", "completion_length"}
    assert Nested(parts=[{"a": PerSource(rewards={"x": LengthReward()})}]).needs == {"completion_length"}
