"""Finds what will hinder learning: statistics of a run's problems, rewards and first rollouts, and rules about them."""
