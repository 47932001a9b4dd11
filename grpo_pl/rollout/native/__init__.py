"""The native engine: an own decode loop for the Llama family."""

from grpo_pl.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
