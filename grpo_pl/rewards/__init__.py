"""Rewards: strings in, scores out; importing this package does not import torch."""

from grpo_pl.rewards.base import Reward, Score, Status
from grpo_pl.rewards.format import FormatReward
from grpo_pl.rewards.math_answer import ExactReward, MathReward

__all__ = ["ExactReward", "FormatReward", "MathReward", "Reward", "Score", "Status"]
