"""Rollouts by Ray: actors on any host of a cluster hold the workers of engines in a child process."""

from grpo_pl.rollout.ray.engine import RayEngine as RayEngine
