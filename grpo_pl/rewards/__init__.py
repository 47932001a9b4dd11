"""Rewards: strings in, scores out; importing this package does not import torch."""

from grpo_pl.rewards.base import Reward, Score, Status, StepScores
from grpo_pl.rewards.countdown import CountdownReward
from grpo_pl.rewards.environment import EnvironmentReward
from grpo_pl.rewards.format import FormatReward
from grpo_pl.rewards.function import FunctionReward
from grpo_pl.rewards.judge import JudgeReward
from grpo_pl.rewards.language import LanguageConsistencyReward
from grpo_pl.rewards.length import LengthReward, RepetitionReward
from grpo_pl.rewards.mathematics.math_reward import ExactReward, MathReward
from grpo_pl.rewards.mathematics.second_opinion import LenientAnswerReward, StrictAnswerReward
from grpo_pl.rewards.model import ModelReward
from grpo_pl.rewards.per_source import PerSource
from grpo_pl.rewards.process import ColumnArithmeticReward, ProcessModelReward, ProcessReward
from grpo_pl.rewards.programs.code_reward import CodeReward
from grpo_pl.rewards.reasoning_gym import ReasoningGymReward
from grpo_pl.rewards.rubric import RubricReward
from grpo_pl.rewards.sorting import SortingReward
from grpo_pl.rewards.subset_sum import SubsetSumReward

__all__ = [
    "CodeReward",
    "ColumnArithmeticReward",
    "CountdownReward",
    "EnvironmentReward",
    "ExactReward",
    "FormatReward",
    "FunctionReward",
    "JudgeReward",
    "LanguageConsistencyReward",
    "LengthReward",
    "LenientAnswerReward",
    "MathReward",
    "ModelReward",
    "PerSource",
    "ProcessModelReward",
    "ProcessReward",
    "ReasoningGymReward",
    "RepetitionReward",
    "Reward",
    "RubricReward",
    "Score",
    "SortingReward",
    "Status",
    "StepScores",
    "StrictAnswerReward",
    "SubsetSumReward",
]
