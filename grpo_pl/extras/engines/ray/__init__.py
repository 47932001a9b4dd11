"""Rollouts by Ray: actors on the hosts of a cluster draw with the workers of child engines."""

from grpo_pl.extras.engines.ray.engine import RayEngine as RayEngine
