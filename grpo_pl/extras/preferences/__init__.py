"""Reward models: trained on pairs of completions, and renewed during RL."""
