"""Rollouts by vLLM: our draws inside its decode loop, in a process of its own."""

from grpo_pl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
