"""The endpoint that judges ask."""

from tests.rewards.conftest import endpoint

__all__ = ["endpoint"]
