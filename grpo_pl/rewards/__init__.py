"""Rewards: strings in, scores out.

Each name in ``__all__`` is loaded when it is first asked for: sandbox workers import modules of this package and must
start fast. Nothing here imports torch. Some rewards are extras, and have their public names here as well.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time the table below counts
    from grpo_pl.extras.code.code_reward import CodeReward as CodeReward
    from grpo_pl.extras.judges.judge import JudgeReward as JudgeReward
    from grpo_pl.extras.judges.model import ModelReward as ModelReward
    from grpo_pl.extras.judges.process_model import ProcessModelReward as ProcessModelReward
    from grpo_pl.extras.judges.rubric import RubricReward as RubricReward
    from grpo_pl.rewards.base import Reward as Reward
    from grpo_pl.rewards.base import Score as Score
    from grpo_pl.rewards.base import Status as Status
    from grpo_pl.rewards.base import StepScores as StepScores
    from grpo_pl.rewards.completion_text import boxed_or_block as boxed_or_block
    from grpo_pl.rewards.environment import EnvironmentReward as EnvironmentReward
    from grpo_pl.rewards.format import FormatReward as FormatReward
    from grpo_pl.rewards.function import FunctionReward as FunctionReward
    from grpo_pl.rewards.language import LanguageConsistencyReward as LanguageConsistencyReward
    from grpo_pl.rewards.length import LengthReward as LengthReward
    from grpo_pl.rewards.length import RepetitionReward as RepetitionReward
    from grpo_pl.rewards.mathematics.math_reward import ExactReward as ExactReward
    from grpo_pl.rewards.mathematics.math_reward import MathReward as MathReward
    from grpo_pl.rewards.mathematics.second_opinion import LenientAnswerReward as LenientAnswerReward
    from grpo_pl.rewards.mathematics.second_opinion import StrictAnswerReward as StrictAnswerReward
    from grpo_pl.rewards.number_puzzles import CountdownReward as CountdownReward
    from grpo_pl.rewards.number_puzzles import SubsetSumReward as SubsetSumReward
    from grpo_pl.rewards.per_source import PerSource as PerSource
    from grpo_pl.rewards.process import ColumnArithmeticReward as ColumnArithmeticReward
    from grpo_pl.rewards.process import ProcessReward as ProcessReward
    from grpo_pl.rewards.reasoning_gym import ReasoningGymReward as ReasoningGymReward
    from grpo_pl.rewards.sorting import SortingReward as SortingReward

_DEFINED_IN = {
    "extras.code.code_reward": "CodeReward",
    "extras.judges.judge": "JudgeReward",
    "extras.judges.model": "ModelReward",
    "extras.judges.process_model": "ProcessModelReward",
    "extras.judges.rubric": "RubricReward",
    "rewards.base": "Reward Score Status StepScores",
    "rewards.completion_text": "boxed_or_block",
    "rewards.environment": "EnvironmentReward",
    "rewards.format": "FormatReward",
    "rewards.function": "FunctionReward",
    "rewards.language": "LanguageConsistencyReward",
    "rewards.length": "LengthReward RepetitionReward",
    "rewards.mathematics.math_reward": "ExactReward MathReward",
    "rewards.mathematics.second_opinion": "LenientAnswerReward StrictAnswerReward",
    "rewards.number_puzzles": "CountdownReward SubsetSumReward",
    "rewards.per_source": "PerSource",
    "rewards.process": "ColumnArithmeticReward ProcessReward",
    "rewards.reasoning_gym": "ReasoningGymReward",
    "rewards.sorting": "SortingReward",
}
"""Module of grpo_pl -> its public rewards."""
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'grpo_pl.rewards' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"grpo_pl.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
