"""Engines on other hosts: the client that a run draws with, and the server that ``grpo-pl engine`` starts."""

from grpo_pl.rollout.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
