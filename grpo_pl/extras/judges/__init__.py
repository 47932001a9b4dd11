"""Rewards by models: behind an endpoint, by a rubric, or loaded here."""
