"""Rollouts by vLLM, in a child process, with our own rule for drawing tokens."""

from grpo_pl.extras.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
